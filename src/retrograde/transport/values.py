"""Values that all ranks bring to one meeting, when nothing else is between them."""

from collections.abc import Sequence
from typing import TypeVar

from retrograde.transport.messages import Reason, Value
from retrograde.transport.protocol import Position, Transport

V = TypeVar("V", bound=Value)


def exchange(transport: Transport, label: str, value: V) -> list[V]:
    """Everybody's value, by rank. All ranks come for the one with this label."""
    positions = transport.meet(Position(Reason.VALUE, label, {}, {}, value))
    require_same(transport, positions)
    return [position.value for position in positions]  # type: ignore[misc]


def require_same(transport: Transport, positions: Sequence[Position]) -> None:
    """All ranks came for the same reason; if that is a value, for the same one."""
    kinds = {(p.reason, p.label if p.reason is Reason.VALUE else "") for p in positions}
    if len(kinds) > 1:
        places = "; ".join(f"rank {r} is at {p.reason} ({p.label})" for r, p in enumerate(positions))
        transport.fail(f"rank {transport.rank}: ranks cannot be reconciled: {places}")
