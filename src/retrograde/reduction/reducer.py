"""The reducer: what happens to a gradient between its page's node and `.grad`.

[Note: the life of a gradient]
Gather's backward hands over the full gradients of a unit. Either they are *launched*: copied once into a bucket
and put to their owners while backward goes on, or they are *pending*: added up in a local bucket until a step, a
flush or the next backward outside a window launches them. The first Pack of a backward (all Gathers have run) is
its end: ranks meet, each learns who put what, sums its shard's part and hands the pieces to autograd, so that
hooks, `inputs=`, `autograd.grad` and accumulation into `.grad` are torch's own. (Threads number their nodes from 0, as
Pack is: a graph made in a new thread may have a Gather left then, which is the occasion of another end.)

Rule 1: a backward is a graph task. Nested backwards have their own and meet at their own end.
Rule 2: nothing waits for another rank's main thread before the end of the backward.
Rule 3: gradients that come from other ranks only, or from a flush, are delivered through Pack as well.
Rule 4: reading `.grad` waits for nobody. Ranks meet before something is computed from gradients or written to `.grad`,
        if some have come: the backwards of a rank that did more come before it.
Rule 5: what a backward that raised has left is dropped at the next entry, but for what others brought before it.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from retrograde.comm import Key, Kind, Offer, Offers, Part, Station, Use
from retrograde.errors import UnsupportedError
from retrograde.ledger import Ledger
from retrograde.reduction.bucket import Bucket, Grads
from retrograde.reduction.council import Council
from retrograde.reduction.exchange import Exchange, Launch, accumulated
from retrograde.reduction.window import Windows
from retrograde.residency import Gate, Pager, Unit

_graph_task = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


@dataclass(slots=True)
class Task:
    """One backward of ours: what it launched, and what came from others."""

    launches: dict[Part, Launch] = field(default_factory=dict)
    joined: list[tuple[Unit, torch.Tensor, tuple[bool, ...]]] = field(default_factory=list)
    accepting: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # what was frozen since it came


class Reducer:
    def __init__(self, units: list[Unit], exchange: Exchange, station: Station, pager: Pager, ledger: Ledger) -> None:
        self._units, self._exchange, self._station, self.pager = units, exchange, station, pager
        self.gate = Gate(station, units, self.fence)
        self.council = Council(station, self, ledger)
        self._tasks: dict[int, Task] = {}
        self.pending: dict[int, Bucket] = {}  # gradients added up locally, by unit
        self._delivering: dict[int, tuple[bool, ...]] = {}
        self.windows = Windows()
        self._steps = self._backwards = 0
        self.fresh = False  # have gradients come since all ranks were last at the same place?

    # ---- autograd calls these
    def gathered(self, unit: Unit, grads: Grads) -> torch.Tensor | None:
        """All gradients of `unit` in this backward have arrived."""
        self.pager.retire(unit)
        uses = tuple(map(_use, unit.accumulators, grads, unit.trained, unit.outs))
        grads = [grad.to_dense() if grad is not None and use else None for grad, use in zip(grads, uses, strict=True)]
        self.fresh |= Use.ACCUMULATED in uses
        if torch.is_grad_enabled():
            return _Reduce.apply(self, unit, uses, self._task(), *grads)  # type: ignore[no-any-return, no-untyped-call]
        if Use.CAPTURED not in uses:
            if (self.windows.open or (self._exchange.policy.until_step and not unit.hooked)) and self._make_room(unit):
                self.keep(unit, grads)
                return None
            if unit.index in self.pending:
                self.keep(unit, grads)  # the first backward after `no_sync()` takes along what was kept
                return self._launch_pending(Part(unit.index))
        return self._launched(Part(unit.index), self._exchange.send(unit, grads, uses))

    def packed(self, unit: Unit, grad: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """The pieces of a reduced gradient, for the leaves."""
        present = self._delivering.get(unit.index)
        if present is None:
            launch = self._task().launches[Part(unit.index)]
            if not launch.present:
                self._end_backward(self._task())
            present = launch.present
        layout, rank = unit.layout, unit.rank
        return [grad[layout.piece(s, rank)] if p else None for s, p in zip(layout.slots, present, strict=True)]

    def captured(self, unit: Unit, slot: int, grad: torch.Tensor) -> torch.Tensor:
        """`torch.autograd.grad` asks for the gradient of a full tensor: reduced, and all of it."""
        uses = tuple(Use.CAPTURED if index == slot else Use.NONE for index in range(len(unit.leaves)))
        grads = [grad.to_dense() if use else None for use in uses]
        shard = _Reduce.apply(self, unit, uses, None, *grads)  # type: ignore[no-untyped-call]
        return _Regather.apply(self, unit, uses, shard)[slot]  # type: ignore[no-any-return, no-untyped-call]

    # ---- a backward
    def _task(self) -> Task:
        if (number := _graph_task()) not in self._tasks:
            self._tasks[number] = Task()
            _queue_callback(lambda: self._close(number))
        return self._tasks[number]

    def _launched(self, part: Part, launch: Launch) -> torch.Tensor:
        for earlier in self._task().launches.values():
            self._exchange.fold(earlier)
        self._task().launches[part] = launch
        return launch.own

    def _launch_pending(self, part: Part) -> torch.Tensor:
        """What was kept goes with this backward."""
        bucket = self.pending.pop(part.unit)
        self._task().accepting.enter_context(bucket.unit.accepting())
        return self._launched(part, self._exchange.launch(bucket, Offer(self._exchange.key(part), _uses_of(bucket))))

    def _end_backward(self, task: Task) -> dict[int, Offers]:
        self._exchange.settle_sending()
        self._backwards += 1
        waiting = {part: launch for part, launch in task.launches.items() if not launch.present}
        mine = {part: launch.offer for part, launch in waiting.items()}
        offers = self.council.end_backward(f"backward {self._backwards} since the last step", mine)
        for part, by_rank in _by_part(offers).items():
            launch, unit = waiting.get(part), self._units[part.unit]
            total = self._exchange.total(unit, by_rank, launch)
            if launch is not None:
                if Use.CAPTURED in launch.offer.uses and any(unit is brought for brought, *_ in task.joined):
                    late = f"rank {unit.rank}: others ended this backward before unit {unit.name} came"
                    self._station.fail(f"{late}; make graphs for torch.autograd.grad in the same thread on all ranks")
                # What another rank captures is its own affair; what it accumulates belongs in `.grad` here too.
                both = zip(launch.offer.uses, accumulated(by_rank), strict=True)
                launch.present = tuple(bool(use) or theirs for use, theirs in both)
            if launch is None or part.early:
                task.joined.append((unit, total, accumulated(by_rank)))
        return offers

    def _close(self, number: int) -> None:
        if (task := self._tasks.pop(number, None)) is None:
            return  # it raised, and the next entry has cleaned up
        task.accepting.close()
        if not all(launch.present for launch in task.launches.values()):  # of what had only to make room no Pack runs
            self._end_backward(task)
        for unit, total, present in task.joined:
            self._deliver(unit, total, present)

    def _deliver(self, unit: Unit, total: torch.Tensor, present: tuple[bool, ...]) -> None:
        """Run Pack for a gradient that no backward of this rank brings."""
        if any(present):
            self.fresh = True
            self._delivering[unit.index] = present
            try:
                with unit.accepting():
                    torch.autograd.backward([unit.flat], [total])
            finally:
                del self._delivering[unit.index]

    def recover(self) -> None:
        """Outside any backward: tasks still here belong to backwards that raised."""
        if self._tasks and _graph_task() == -1:
            self._exchange.settle_sending()
            for number, task in list(self._tasks.items()):
                # What had to make room came from backwards that did not raise.
                for part in [part for part in task.launches if not part.early]:
                    self._exchange.give_up(task.launches.pop(part))
                self._close(number)

    # ---- leaves and optimizers
    def full(self, unit: Unit, slot: int) -> torch.Tensor:
        self.recover()
        return self.pager.access(unit, slot)

    def settle(self, why: str, kind: Kind = Kind.FLUSH) -> None:
        """`.grad` shows what torch would: gradients still pending are reduced first (Rule 4: others' too)."""
        self.recover()
        if (self.fresh if kind is Kind.TOTAL else self.pending) and _graph_task() == -1:
            self.council.attend(kind, why)

    def fence(self, what: str) -> None:
        """Before an edit of the weights in place."""
        self.pager.quiesce()
        self.council.attend(Kind.FENCE, what)

    def begin_step(self) -> None:
        self.recover()
        self.pager.quiesce()
        self._steps += 1
        self.council.attend(Kind.STEP, f"step {self._steps}")
        self.pager.release()
        self._exchange.pool.trim()  # the optimizer may have temporaries of its own

    def end_step(self) -> None:
        self.gate.settle()
        self.pager.renew()

    # ---- pending gradients
    def _make_room(self, unit: Unit) -> bool:
        """May the gradient of `unit` wait? With a budget, others may have to go first."""
        early = self.windows.room(unit.index, unit.layout.page_bytes, self.held)
        parts = [Part(index, early=True) for index in early or ()]
        if any(part in self._task().launches for part in parts):
            return False  # once in a backward; what came since then is from a backward inside this one
        for part in parts:
            self._launch_pending(part)
        return early is not None

    @property
    def held(self) -> dict[int, int]:
        """Bytes of unreduced gradients that wait, by unit."""
        return {index: self._units[index].layout.page_bytes for index in self.pending}

    def forget(self, unit: Unit, slot: int) -> None:
        """`.grad` was set: what is pending for this parameter has no place to go."""
        if (pending := self.pending.get(unit.index)) is not None:
            pending.present[slot] = False
            if not any(pending.present):
                self.pending.pop(unit.index).discard()

    def keep(self, unit: Unit, grads: Grads) -> None:
        if unit.index not in self.pending:
            self._exchange.settle_sending()  # its memory is free before more is taken
            self.pending[unit.index] = Bucket(unit, self._exchange.pool, {})
        self.pending[unit.index].add(grads)

    # ---- meetings
    def offers(self) -> Offers:
        """For the meeting to come, after which they may be launched in turn 0."""
        meeting = self._station.meetings + 1
        return {Part(i): Offer(Key(i, meeting, 0), _uses_of(bucket)) for i, bucket in sorted(self.pending.items())}

    def join(self, offers: dict[int, Offers]) -> None:
        """Take part in what other ranks end, with what is pending here if this rank has offered it."""
        for part, by_rank in _by_part(offers).items():
            unit, mine = self._units[part.unit], by_rank.get(self._station.mesh.rank)
            launch = None if mine is None else self._exchange.launch(self.pending.pop(part.unit), mine)
            self._deliver(unit, self._exchange.total(unit, by_rank, launch), accumulated(by_rank))
        self._exchange.settle_sending()

    def step(self, offers: dict[int, Offers]) -> None:
        """All ranks are at a step."""
        self.join(offers)
        self._backwards = 0
        self._station.discard_arrivals()
        self.gate.advance(Kind.STEP)

    # ---- create_graph
    def reduce_now(self, unit: Unit, grads: Grads, uses: tuple[Use, ...], task: Task | None) -> torch.Tensor:
        """Launch and collect at once, for a reduction that is itself part of a graph."""
        alone = Task()
        launch = alone.launches[Part(unit.index)] = self._exchange.send(unit, grads, uses)
        offered, mine = self._end_backward(alone), {Part(unit.index): launch.offer}
        same = [theirs == mine if task is None else theirs.keys() == mine.keys() for theirs in offered.values()]
        if not all(same) or len(same) < self._station.mesh.world:
            self._station.fail(
                f"rank {unit.rank}: a backward with create_graph=True, or for module.weight itself, reduces unit "
                f"{unit.name} at once: all ranks must be there, with gradients of the same parameters; some were not"
            )
        if task is not None:
            task.launches[Part(unit.index)] = launch
            task.joined += alone.joined
        return launch.own

    def regather(self, unit: Unit, slot: int, piece: torch.Tensor) -> torch.Tensor:
        """All of what `piece` is this rank's part of, as part of the graph that `piece` is part of."""
        place = unit.layout.piece(unit.layout.slots[slot], unit.rank)
        shard = torch.nn.functional.pad(piece, (place.start, unit.layout.shard_numel - place.stop))
        present = [index == slot for index in range(len(unit.leaves))]
        return _Regather.apply(self, unit, present, shard)[slot]  # type: ignore[no-any-return, no-untyped-call]


def _use(accumulator: Any, grad: torch.Tensor | None, trained: bool, out: Any) -> Use:
    try:
        wanted = trained and grad is not None and torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # torch says so when the leaf is captured by autograd.grad()
        return Use.CAPTURED
    if grad is not None and not wanted and out.retains_grad:  # torch has set it, for good: backward() was given `out`
        where = f"rank {out.leaf.unit.rank}: backward(inputs=...) was given the full tensor of parameter"
        name = out.leaf.slot.name
        raise UnsupportedError(f"{where} {name}; give it the parameter itself, model.get_parameter({name!r})")
    return Use.ACCUMULATED if wanted else Use.NONE


def _uses_of(bucket: Bucket) -> tuple[Use, ...]:
    return tuple(Use.ACCUMULATED if present else Use.NONE for present in bucket.present)


def _by_part(offers: dict[int, Offers]) -> dict[Part, dict[int, Offer]]:
    """rank -> part -> offer, turned into part -> rank -> offer, in unit order."""
    parts = sorted({part for by_part in offers.values() for part in by_part})
    return {p: {rank: by_part[p] for rank, by_part in offers.items() if p in by_part} for p in parts}


class _Reduce(torch.autograd.Function):
    """The reduction as a differentiable operation: its transpose is a gather."""

    @staticmethod
    def forward(ctx, reducer, unit, uses, task, *grads):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.reducer, ctx.unit, ctx.present = reducer, unit, [grad is not None for grad in grads]
        return reducer.reduce_now(unit, grads, uses, task)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grads = _Regather.apply(ctx.reducer, ctx.unit, ctx.present, grad)  # type: ignore[no-untyped-call]
        return (None, None, None, None, *grads)


class _Regather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, reducer, unit, present, shard):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.reducer, ctx.unit = reducer, unit
        parts = reducer.council.values(f"the whole of unit {unit.name}", shard.detach().clone)
        views = unit.layout.views(torch.cat(parts))
        return tuple(view if p else None for view, p in zip(views, present, strict=True))

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        uses = tuple(Use.NONE if grad is None else Use.CAPTURED for grad in grads)
        return None, None, None, _Reduce.apply(ctx.reducer, ctx.unit, uses, None, *grads)  # type: ignore[no-untyped-call]
