"""What ranks say at a meeting about gradients they have sent, and what follows from it."""

import math
from collections.abc import Mapping, Sequence

from retrograde.gradients.keys import by_key
from retrograde.pages import Unit
from retrograde.transport import Offers, Position, Reason, Transport, Use, Uses


def accumulated(offers: Mapping[int, Uses]) -> tuple[bool, ...]:
    """For each parameter, whether its gradient goes to `.grad` on any rank."""
    return tuple(Use.ACCUMULATED in uses for uses in zip(*offers.values(), strict=True))


def last_due(positions: Sequence[Position]) -> float:
    """The first of the backwards at whose end a rank is: a meeting adds up what was sent up to it."""
    ended = [position.value for position in positions if position.reason is Reason.BACKWARD]
    return min([number for number in ended if isinstance(number, int)], default=math.inf)


def due_offers(positions: Sequence[Position]) -> dict[int, Offers]:
    """What a meeting adds up, and what was withdrawn."""
    last = last_due(positions)
    return {
        rank: {key: uses for key, uses in position.sent.items() if key.backward <= last or not uses}
        for rank, position in enumerate(positions)
    }


def without_withdrawn(offers: Mapping[int, Offers], transport: Transport, units: Sequence[Unit]) -> dict[int, Offers]:
    """Without what ranks have given up (`Strategy.withdrawn`): all of them, or it cannot be taken back."""
    for key, ranks in by_key(offers).items():
        withdrawn = [rank for rank, uses in ranks.items() if not uses]
        others = [rank for rank in range(transport.world) if rank not in withdrawn]
        if withdrawn and others:
            transport.fail(
                f"rank {transport.rank}: rank {withdrawn[0]} gave up a backward after all ranks had brought "
                f"their gradient of unit {units[key.unit].name}, and rank {others[0]} did not; let all ranks "
                f"give up a backward, or none"
            )
    return {rank: {key: uses for key, uses in sent.items() if uses} for rank, sent in offers.items()}
