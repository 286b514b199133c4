"""Adds up the gradients of parameters that stages of several ranks use: once a step, in the order of the stages.

[Note: a tie]
The first of a tie's ranks adds up the gradients and sends the sum to the others. All ranks of the pipeline meet and say
whether they have a gradient. Gradients and sums travel as parts of gradients do (transport/protocol.py).

    last rank     put its gradient ──┐              ┌── take the sum
    all ranks     ───────────── meeting: who has one ──────────────
    first rank                       └─> take, add, put the sum

On a device, gradients and sums are staged in the host's memory (transport/staged.py), and the host waits for them.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from retrograde.devices import Streams
from retrograde.engine import Engine
from retrograde.parameters import ShardedParameter
from retrograde.pipeline.blocks import Tie
from retrograde.transport import Key, Offers, Position, Reason, Rest, Stamp, Transport, Use, Work

_GRADIENT, _SUM = 1, 2  # turns of keys: what is put is a rank's gradient, or the sum


class TiedParameters:
    """Tells a transport how large the gradients of tied parameters are. Implements `ShardServer`."""

    def __init__(self) -> None:
        self.mine: dict[int, Tie] = {}  # this rank's ties, by their place among all ties of the pipeline

    def shard_numel(self, unit: int) -> int:
        parameter = self.mine[unit].parameter
        return parameter.slot.numel if isinstance(parameter, ShardedParameter) else parameter.numel()

    def state(self) -> tuple[int, Rest]:
        return 0, Rest.ASK

    def shard_for(self, unit: int, stamp: Stamp) -> Tensor | str:
        return "stages of a pipeline have no shards to read"


class TieSums:
    """Sums the gradients of ties. All ranks give the same ties; a rank keeps those whose parameters it has."""

    def __init__(self, ties: Sequence[Tie], parameters: TiedParameters, transport: Transport, streams: Streams) -> None:
        self._any = bool(ties)
        self._streams = streams
        self._transport = transport
        self._mine = {index: tie for index, tie in enumerate(ties) if transport.rank in tie.ranks}
        parameters.mine = self._mine

    @contextlib.contextmanager
    def of_plain(self) -> Iterator[None]:
        """Sum over ranks what the step inside adds to the gradients of plain tied parameters."""
        before = {index: tie.parameter.grad for index, tie in self._mine.items()}
        for tie in self._mine.values():
            tie.parameter.grad = None
        try:
            yield
            sums = self._sums({index: tie.parameter.grad for index, tie in self._mine.items()})
            for index, tie in self._mine.items():
                total = sums[index]
                tie.parameter.grad = None if total is None else total.view(tie.parameter.shape)
        finally:
            for index, tie in self._mine.items():
                old, new = before[index], tie.parameter.grad
                if old is not None:
                    tie.parameter.grad = old if new is None else old.add_(new)

    @contextlib.contextmanager
    def of_sharded(self, engine: Engine) -> Iterator[None]:
        """As `of_plain` for sharded parameters: in each replica before replicas are reduced, as plain torch would."""
        if self._mine:
            # From here on only gradients of this step wait.
            engine.coordinator.flush_pending_gradients("a pipeline step with tied parameters")
        yield
        leaves = {index: _sharded(tie) for index, tie in self._mine.items()}
        own = {index: engine.pending.waiting_for(leaf.unit, leaf.place) for index, leaf in leaves.items()}
        sums = self._sums(own)  # in memory order on all ranks
        for index, leaf in leaves.items():
            total, waiting = sums[index], own[index]
            if waiting is not None and total is not None:
                waiting.copy_(total)
            elif total is not None:
                grads = [leaf.slot.full(total) if other is leaf else None for other in leaf.unit.leaves]
                engine.pending.keep(leaf.unit, grads)

    def _sums(self, own: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
        """The flat sums of this rank's ties, None where no rank has a gradient. All ranks of the pipeline call this."""
        if not self._any:
            return {}
        meeting = self._transport.meetings
        flat = {index: grad.reshape(-1) for index, grad in own.items() if grad is not None}
        keys = {index: Key(index, meeting, 0, _GRADIENT) for index in flat}
        works = [self._put_to_first(keys[index], self._mine[index], grad) for index, grad in flat.items()]
        offers: Offers = dict.fromkeys(keys.values(), (Use.ACCUMULATED,))
        positions = self._transport.meet(Position(Reason.VALUE, "gradients of tied parameters", offers, {}))
        sums: dict[int, Tensor | None] = {}
        for index, tie in self._mine.items():
            key = Key(index, meeting, 0, _GRADIENT)
            having = [rank for rank in tie.ranks if key in positions[rank].sent]
            sums[index] = self._sum(key, tie, having, flat.get(index)) if having else None
        for work in works:
            if work is not None:
                work.wait(self._streams.current())
        return sums

    def _put_to_first(self, key: Key, tie: Tie, grad: Tensor) -> Work | None:
        first = tie.ranks[0]
        return None if first == self._transport.rank else self._transport.put(key, {first: [grad]})

    def _sum(self, key: Key, tie: Tie, having: list[int], own: Tensor | None) -> Tensor:
        first, *others = tie.ranks
        result = Key(key.unit, key.meeting, key.attempt, _SUM)
        if self._transport.rank != first:
            return self._take(result, first, tie)
        total = own
        for rank in having:
            if rank != first:
                part = self._take(key, rank, tie)
                total = part if total is None else total + part
        assert total is not None  # somebody has one
        self._transport.put(result, {other: [total] for other in others}).wait(self._streams.current())
        return total

    def _take(self, key: Key, src: int, tie: Tie) -> Tensor:
        """Take a part for use on the current stream.

        It was made on the reducing stream. A staged transport has the host wait for that; the door promises nothing."""
        part = self._transport.take(key, src, tie.name)
        current = self._streams.current()
        current.wait(self._streams.reducing.record())
        current.hold(part)
        return part


def _sharded(tie: Tie) -> ShardedParameter:
    assert isinstance(tie.parameter, ShardedParameter)
    return tie.parameter
