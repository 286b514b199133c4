"""The reducer: what happens to a gradient between its page's node and `.grad`.

[Note: the life of a gradient]
Gather's backward hands over the full gradients of a unit. Either they are *launched*: copied once into a bucket
and put to their owners while backward goes on, or they are *pending*: added up in a local bucket until a step, a
flush or the next backward outside a window launches them. The first Pack of a backward (all Gathers have run) is
its end: ranks meet, each learns who put what, sums its shard's part and hands the pieces to autograd, so that
hooks, `inputs=`, `autograd.grad` and accumulation into `.grad` are torch's own. (Threads number their nodes from 0, as
Pack is: a graph made in a new thread may have a Gather left then, which is the occasion of another end.)

Rule 1: a backward is a graph task. Nested backwards have their own and meet at their own end, where also what those
        around them have launched is added up (exchange.py); it is handed to autograd by the Packs that wait for it.
Rule 2: nothing waits for another rank's main thread before the end of the backward.
Rule 3: gradients that come from other ranks only, or from a flush, are delivered through Pack as well.
Rule 4: reading `.grad` waits for nobody. Ranks meet before something is computed from gradients or written to `.grad`,
        if some have come: the backwards of a rank that did more come before it.
Rule 5: what a backward that raised has launched is given up at the next entry. What was added up before is delivered:
        other ranks have it too. So is what others brought, and what had to make room in a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from retrograde.errors import UnsupportedError
from retrograde.gradients.bucket import Bucket, Grads
from retrograde.gradients.council import Council
from retrograde.gradients.exchange import Exchange, Launch, State, accumulated, by_key
from retrograde.gradients.window import Windows
from retrograde.ledger import Ledger
from retrograde.pages import Gate, Pager, Unit
from retrograde.transport import Key, Offers, Reason, Station, Use, Uses

_graph_task = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class Joined(NamedTuple):
    """A reduced gradient that no Pack of this rank waits for, and which parameters it is for."""

    unit: Unit
    total: torch.Tensor
    wanted: tuple[bool, ...]


@dataclass(slots=True)
class Task:
    """One backward of ours: what it launched, what of it Pack will ask for (by unit), and what came from others."""

    launches: list[Launch] = field(default_factory=list)
    packing: dict[int, Launch] = field(default_factory=dict)
    joined: list[Joined] = field(default_factory=list)

    @property
    def unsettled(self) -> list[Launch]:
        return [launch for launch in self.launches if launch.state is State.SENT]


class Reducer:
    def __init__(self, units: list[Unit], exchange: Exchange, station: Station, pager: Pager, ledger: Ledger) -> None:
        self._units, self._exchange, self._station, self.pager = units, exchange, station, pager
        self.gate = Gate(station, units, self.fence)
        self.council = Council(station, self, ledger)
        self._tasks: dict[int, Task] = {}
        self._orphans: list[Launch] = []  # had to make room in a backward that raised: they count all the same
        self.pending: dict[int, Bucket] = {}  # gradients added up locally, by unit
        self._delivering: dict[int, tuple[bool, ...]] = {}
        self.windows = Windows()
        self._steps = self._backwards = 0
        self.fresh = False  # have gradients come since all ranks were last at the same place?

    # ---- autograd calls these
    def gathered(self, unit: Unit, grads: Grads) -> torch.Tensor | None:
        """All gradients of `unit` in this backward have arrived."""
        self.pager.retire(unit)
        fates = tuple(map(_fate, unit.accumulators, grads, unit.trained, unit.outs))
        uses = tuple(Use.NONE if grad is None else fate for fate, grad in zip(fates, grads, strict=True))
        grads = [grad.to_dense() if grad is not None and use else None for grad, use in zip(grads, uses, strict=True)]
        self.fresh |= Use.ACCUMULATED in uses
        if torch.is_grad_enabled():
            return _Reduce.apply(self, unit, uses, fates, *grads)  # type: ignore[no-any-return, no-untyped-call]
        if not any(uses):
            return None  # `inputs=` has a parameter of this unit, on which nothing depends
        if Use.CAPTURED not in uses:
            waits = bool(self.windows.open) or (self._exchange.policy.until_step and not unit.hooked)
            if waits:
                waits = self._make_room(unit)
            if waits:
                self.keep(unit, grads)
                return None
            if unit.index in self.pending:
                self.keep(unit, grads)  # the first backward after `no_sync()` takes along what was kept
                return self._for_pack(self._launch_pending(unit.index), fates)
        return self._for_pack(self._launched(self._exchange.send(unit, grads, uses)), fates)

    def packed(self, unit: Unit, grad: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """The pieces of a reduced gradient, for the leaves."""
        present = self._delivering.get(unit.index)
        if present is None:
            launch = self._task().packing[unit.index]
            if launch.state is State.SENT:
                self._end_backward(self._task())
            launch.become(State.DELIVERED)
            present = launch.packed
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

    def _launched(self, launch: Launch) -> Launch:
        for earlier in self._task().unsettled:
            self._exchange.fold(earlier)
        self._task().launches.append(launch)
        return launch

    def _for_pack(self, launch: Launch, fates: Uses) -> torch.Tensor:
        """What Gather hands on; Pack gets it when the ranks' parts have been added up in it."""
        self._task().packing[launch.unit.index] = launch
        launch.reached = tuple(fate is Use.ACCUMULATED for fate in fates)
        return launch.own

    def _launch_pending(self, index: int, early: bool = False) -> Launch:
        """What was kept goes with this backward."""
        bucket = self.pending.pop(index)
        key = self._exchange.key(bucket.unit, early)
        return self._launched(self._exchange.launch(bucket, key, _uses_of(bucket), early))

    def launched(self) -> Offers:
        """For the meeting to come: what it will add up."""
        self.recover()
        return {launch.key: launch.uses for launch in self._unsettled()}

    def _unsettled(self) -> list[Launch]:
        of_tasks = [launch for task in self._tasks.values() for launch in task.unsettled]
        return of_tasks + self._orphans

    def _end_backward(self, task: Task) -> dict[int, Offers]:
        self._exchange.settle_sending()
        self._backwards += 1
        offers = self.council.end_backward(f"backward {self._backwards} since the last step")
        task.joined += self._add_up(offers)
        return offers

    def _add_up(self, offers: dict[int, Offers]) -> list[Joined]:
        """All that any rank has launched before this meeting; returns what no Pack of this rank waits for."""
        mine = {launch.key: launch for launch in self._unsettled()}
        self._orphans.clear()
        joined = []
        for key, by_rank in by_key(offers).items():
            unit, launch, wanted = self._units[key.unit], mine.get(key), accumulated(by_rank)
            if launch is None:
                joined.append(Joined(unit, self._exchange.join(unit, key, by_rank), wanted))
                continue
            self._check_in_time(launch)
            total = self._exchange.total(launch, by_rank)
            launch.wanted = wanted
            launch.become(State.SUMMED)
            if any(launch.left_over):
                apart = total.clone() if Use.CAPTURED in launch.uses else total  # what is captured is the user's
                joined.append(Joined(unit, apart, launch.left_over))
        return joined

    def _check_in_time(self, launch: Launch) -> None:
        """`torch.autograd.grad` returns one sum: what others ended before it cannot be added to that any more."""
        came = [each.unit for task in self._tasks.values() if launch in task.launches for each in task.joined]
        if Use.CAPTURED in launch.uses and launch.unit in came:
            self._station.fail(
                f"rank {launch.unit.rank}: others ended this backward before unit {launch.unit.name} came; "
                f"make graphs for torch.autograd.grad in the same thread on all ranks"
            )

    def _close(self, number: int) -> None:
        if (task := self._tasks.get(number)) is None:
            return  # it raised, and the next entry has cleaned up
        if task.unsettled:  # of what had only to make room no Pack runs
            self._end_backward(task)
        del self._tasks[number]
        for joined in task.joined:
            self._deliver(joined)

    def _deliver(self, joined: Joined) -> None:
        """Run Pack for a gradient that no backward of this rank brings."""
        unit, total, wanted = joined
        if any(wanted):
            self.fresh = True
            self._delivering[unit.index] = wanted
            try:
                with unit.accepting():
                    torch.autograd.backward([unit.flat], [total])
            finally:
                del self._delivering[unit.index]

    def recover(self) -> None:
        """Clean up after backwards that raised: those that began after the one that runs now, or all if none does."""
        running = _graph_task()
        for number in [number for number in self._tasks if number > running]:
            self._abandon(self._tasks.pop(number))

    def _abandon(self, task: Task) -> None:
        self._exchange.settle_sending()
        for launch in task.launches:
            if launch.state is State.SENT and launch.early:
                self._orphans.append(launch)  # from backwards that did not raise
            elif launch.state is State.SENT:
                self._exchange.give_up(launch)
            elif launch.state is State.SUMMED:
                launch.become(State.DELIVERED)
                task.joined.append(Joined(launch.unit, launch.own, launch.delivered_by_pack))
        for joined in task.joined:
            self._deliver(joined)

    # ---- leaves and optimizers
    def full(self, unit: Unit, slot: int) -> torch.Tensor:
        self.recover()
        return self.pager.access(unit, slot)

    def settle(self, why: str, kind: Reason = Reason.FLUSH) -> None:
        """`.grad` shows what torch would: gradients still pending are reduced first (Rule 4: others' too)."""
        self.recover()
        needed = self.fresh if kind is Reason.TOTAL else bool(self.pending or self._orphans)
        if needed and _graph_task() == -1:
            self.council.attend(kind, why)

    def wait_for_gradients(self, why: str) -> None:
        """This rank is about to use gradients and has none: the others' backwards, up to the same place, come first."""
        self.recover()
        if _graph_task() == -1:
            self.council.attend(Reason.FLUSH, why)

    def fence(self, what: str) -> None:
        """Before an edit of the weights in place."""
        self.pager.quiesce()
        self.council.attend(Reason.FENCE, what)

    def begin_step(self) -> None:
        self.recover()
        self.pager.quiesce()
        self._steps += 1
        self.council.attend(Reason.STEP, f"step {self._steps}")
        self.pager.release()
        self._exchange.pool.trim()  # the optimizer may have temporaries of its own

    def end_step(self) -> None:
        self.gate.settle()
        self.pager.renew()

    # ---- pending gradients
    def _make_room(self, unit: Unit) -> bool:
        """May the gradient of `unit` wait? With a budget, others may have to go first."""
        early = self.windows.room(unit.index, unit.layout.page_bytes, self.held)
        for index in early or ():
            self._launch_pending(index, early=True)
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
    def pending_offers(self) -> Offers:
        """For the meeting to come, after which they may be launched in turn 0."""
        meeting = self._station.meetings + 1
        return {Key(i, meeting, 0, 0): _uses_of(bucket) for i, bucket in sorted(self.pending.items())}

    def join_launched(self, offers: dict[int, Offers]) -> None:
        """Take part in what other ranks have launched."""
        for joined in self._add_up(offers):
            self._deliver(joined)

    def join_pending(self, offers: dict[int, Offers]) -> None:
        """Bring what is pending here, and take part in what is pending elsewhere."""
        for key, by_rank in by_key(offers).items():
            unit, wanted = self._units[key.unit], accumulated(by_rank)
            if self._station.mesh.rank in by_rank:
                launch = self._exchange.launch(self.pending.pop(key.unit), key, by_rank[self._station.mesh.rank])
                total = self._exchange.total(launch, by_rank)
            else:
                total = self._exchange.join(unit, key, by_rank)
            self._deliver(Joined(unit, total, wanted))
        self._exchange.settle_sending()

    def step(self, offers: dict[int, Offers]) -> None:
        """All ranks are at a step."""
        self.join_pending(offers)
        self._backwards = 0
        self._station.discard_arrivals()
        self.gate.advance(Reason.STEP)

    # ---- create_graph
    def reduce_now(self, unit: Unit, grads: Grads, uses: Uses, fates: Uses | None) -> torch.Tensor:
        """Launch and collect at once, for a reduction that is itself part of a graph.

        `fates`: what Pack does with it. Without, whoever asks gets it, and all ranks ask for the same parameters."""
        launch = self._launched(self._exchange.send(unit, grads, uses))
        own = launch.own if fates is None else self._for_pack(launch, fates)
        offered = self._end_backward(self._task())
        theirs = [of_rank.get(launch.key) for of_rank in offered.values()]
        if None in theirs or (fates is None and any(each != uses for each in theirs)):
            self._station.fail(
                f"rank {unit.rank}: a backward with create_graph=True, or for module.weight itself, reduces unit "
                f"{unit.name} at once: all ranks must be there, with gradients of the same parameters; some were not"
            )
        if fates is None:
            launch.become(State.DELIVERED)
        return own

    def regather(self, unit: Unit, slot: int, piece: torch.Tensor) -> torch.Tensor:
        """All of what `piece` is this rank's part of, as part of the graph that `piece` is part of."""
        place = unit.layout.piece(unit.layout.slots[slot], unit.rank)
        shard = torch.nn.functional.pad(piece, (place.start, unit.layout.shard_numel - place.stop))
        present = [index == slot for index in range(len(unit.leaves))]
        return _Regather.apply(self, unit, present, shard)[slot]  # type: ignore[no-any-return, no-untyped-call]


def _fate(accumulator: Any, grad: torch.Tensor | None, trained: bool, out: Any) -> Use:
    """What the backward that runs does with this parameter's gradient, if there is one."""
    try:
        wanted = trained and torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # torch says so when the leaf is captured by autograd.grad()
        return Use.CAPTURED
    if grad is not None and not wanted and out.retains_grad:  # torch has set it, for good: backward() was given `out`
        where = f"rank {out.leaf.unit.rank}: backward(inputs=...) was given the full tensor of parameter"
        name = out.leaf.slot.name
        raise UnsupportedError(f"{where} {name}; give it the parameter itself, model.get_parameter({name!r})")
    return Use.ACCUMULATED if wanted else Use.NONE


def _uses_of(bucket: Bucket) -> Uses:
    return tuple(Use.ACCUMULATED if present else Use.NONE for present in bucket.present)


class _Reduce(torch.autograd.Function):
    """The reduction as a differentiable operation: its transpose is a gather."""

    @staticmethod
    def forward(ctx, reducer, unit, uses, fates, *grads):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.reducer, ctx.unit, ctx.present = reducer, unit, [grad is not None for grad in grads]
        return reducer.reduce_now(unit, grads, uses, fates)

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
