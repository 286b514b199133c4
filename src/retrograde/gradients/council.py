"""What ranks conclude from a meeting.

Ranks come to a meeting for different reasons: one ends its third backward, another is already at the step. The
most urgent reason goes first; ranks that came for another take part as far as they are needed and meet again.
All ranks see the same positions, so all go through the same sequence. Whatever the reasons are, gradients that any rank
has launched before the meeting are added up at it (exchange.py, Rule 1).

| some rank is at       | the others                                                        |
|-----------------------|-------------------------------------------------------------------|
| the end of a backward | join its reductions with what they have (nothing counts as zero)  |
| an edit               | note that the weights change (the clock moves) and wait           |
| a flush               | bring their own pending gradients                                 |
| a step                | all must be here                                                  |
| a value over ranks    | all must be here, for the same value                              |
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from retrograde.ledger import Activity, Ledger
from retrograde.transport import Offers, Position, Reason, Station, Value

if TYPE_CHECKING:
    from retrograde.gradients.flow import Reducer

V = TypeVar("V", bound=Value)


class Council:
    def __init__(self, station: Station, member: "Reducer", ledger: Ledger) -> None:
        self._station, self._member, self._ledger = station, member, ledger

    def end_backward(self, label: str) -> dict[int, Offers]:
        """Meet at the end of a backward; returns what each rank has launched before it."""
        positions = self._meet(Position(Reason.BACKWARD, label, self._member.launched(), {}))
        return {rank: position.launched for rank, position in enumerate(positions)}

    def values(self, label: str, value: Callable[[], V]) -> list[V]:
        """Everybody's value, by rank. Asked for anew if a flush changed gradients while this rank waited."""
        return [p.value for p in self.attend(Reason.TOTAL, label, value)]  # type: ignore[misc]

    def attend(self, kind: Reason, label: str, value: Callable[[], Value] = lambda: None) -> list[Position]:
        """Meet for `kind`, and for what others came for before it; returns the positions of the last meeting."""
        member = self._member
        while True:
            positions = self._meet(Position(kind, label, member.launched(), member.pending_offers(), value()))
            first = min((p.kind for p in positions), key=tuple(Reason).index)
            if first in (Reason.STEP, Reason.TOTAL):
                self._require_same(positions)
            member.join_launched({rank: position.launched for rank, position in enumerate(positions)})
            pending = {rank: position.pending for rank, position in enumerate(positions)}
            match first:
                case Reason.FENCE:
                    member.gate.advance(kind if kind is Reason.FENCE else None)
                case Reason.FLUSH:
                    member.join_pending(pending)
                case Reason.STEP:
                    member.step(pending)
            if first is kind:
                member.fresh &= kind not in (Reason.STEP, Reason.TOTAL)
                return positions

    def _meet(self, position: Position) -> list[Position]:
        self._ledger.record(Activity.AGREE, position.kind.name.lower())
        return self._station.meet(position)

    def _require_same(self, positions: list[Position]) -> None:
        if len({(p.kind, p.label if p.kind is Reason.TOTAL else "") for p in positions}) > 1:
            places = "; ".join(f"rank {r} is at {p.kind} ({p.label})" for r, p in enumerate(positions))
            self._station.fail(f"rank {self._station.mesh.rank}: ranks cannot be reconciled: {places}")
