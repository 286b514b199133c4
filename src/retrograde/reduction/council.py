"""What ranks conclude from a meeting.

Ranks come to a meeting for different reasons: one ends its third backward, another is already at the step. The
most urgent reason goes first; ranks that came for another take part as far as they are needed and meet again.
All ranks see the same positions, so all go through the same sequence.

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

from retrograde.comm import Kind, Offers, Position, Station, Value
from retrograde.ledger import Kind as Entry
from retrograde.ledger import Ledger

if TYPE_CHECKING:
    from retrograde.reduction.reducer import Reducer

V = TypeVar("V", bound=Value)


class Council:
    def __init__(self, station: Station, member: "Reducer", ledger: Ledger) -> None:
        self._station, self._member, self._ledger = station, member, ledger

    def end_backward(self, label: str, offers: Offers) -> dict[int, Offers]:
        """Meet at the end of a backward; returns what each rank that is also at one has put."""
        positions = self._meet(Position(Kind.BACKWARD, label, offers))
        return {rank: p.offers for rank, p in enumerate(positions) if p.kind is Kind.BACKWARD}

    def values(self, label: str, value: Callable[[], V]) -> list[V]:
        """Everybody's value, by rank. Asked for anew if a flush changed gradients while this rank waited."""
        return [p.value for p in self.attend(Kind.TOTAL, label, value)]  # type: ignore[misc]

    def attend(self, kind: Kind, label: str, value: Callable[[], Value] = lambda: None) -> list[Position]:
        """Meet for `kind`, and for what others came for before it; returns the positions of the last meeting."""
        actions: dict[Kind, Callable[[dict[int, Offers]], None]] = {
            Kind.BACKWARD: self._member.join,
            Kind.FENCE: lambda _: self._member.gate.advance(kind if kind is Kind.FENCE else None),
            Kind.FLUSH: self._member.join,
            Kind.STEP: self._member.step,
            Kind.TOTAL: lambda _: None,
        }
        while True:
            positions = self._meet(Position(kind, label, self._member.offers(), value()))
            first = min((p.kind for p in positions), key=tuple(Kind).index)
            if first in (Kind.STEP, Kind.TOTAL):
                self._require_same(positions)
            # At the end of a backward only what was put in one counts.
            actions[first]({r: p.offers for r, p in enumerate(positions) if first in (p.kind, Kind.FLUSH, Kind.STEP)})
            if first is kind:
                self._member.fresh &= kind not in (Kind.STEP, Kind.TOTAL)
                return positions

    def _meet(self, position: Position) -> list[Position]:
        self._ledger.record(Entry.AGREE, position.kind.name.lower())
        return self._station.meet(position)

    def _require_same(self, positions: list[Position]) -> None:
        if len({(p.kind, p.label if p.kind is Kind.TOTAL else "") for p in positions}) > 1:
            places = "; ".join(f"rank {r} is at {p.kind} ({p.label})" for r, p in enumerate(positions))
            self._station.fail(f"rank {self._station.mesh.rank}: ranks cannot be reconciled: {places}")
