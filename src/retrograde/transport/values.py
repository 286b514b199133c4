"""Values that all ranks bring to one meeting, when nothing else is between them."""

from collections.abc import Sequence
from typing import TypeVar

from retrograde.transport.messages import Reason, Value
from retrograde.transport.protocol import Position, Transport

V = TypeVar("V", bound=Value)


def exchange(transport: Transport, label: str, value: V) -> list[V]:
    """Bring a value to a meeting, to which all ranks come for the one with this label.
    Returns every rank's, by rank."""
    positions = transport.meet(Position(Reason.VALUE, label, {}, {}, value))
    require_same(transport, positions)
    return [position.value for position in positions]  # type: ignore[misc]


def require_same(transport: Transport, positions: Sequence[Position]) -> None:
    """Fail unless all ranks came for the same reason, and if that is a value, for the same one."""
    kinds = {(p.reason, p.label if p.reason is Reason.VALUE else "") for p in positions}
    if len(kinds) > 1:
        places = "; ".join(f"rank {r} is at {p.reason} ({p.label})" for r, p in enumerate(positions))
        transport.fail(f"rank {transport.rank}: ranks cannot be reconciled: {places}")
