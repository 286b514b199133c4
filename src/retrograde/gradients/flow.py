"""The gradient flow: what happens to a gradient between its page's node and `.grad`.

[Note: the flow of gradients]
Gather's backward hands over the full gradients of a unit (graph.py). Either they are *sent*: copied once into a bucket
and put to their owners while backward goes on, or they are *pending*: added up in a local bucket until a step, a
flush or the next backward outside a window sends them. The first Pack of a backward (all Gathers have run) is
its end: ranks meet, each learns who put what, sums its shard's part and hands the pieces to autograd, so that
hooks, `inputs=`, `autograd.grad` and accumulation into `.grad` are torch's own. (Threads number their nodes from 0, as
Pack is: a graph made in a new thread may have a Gather left then, which is the occasion of another end.)

Rule 1: what a rank has sent is added up at its next meeting, whatever the meeting is for. So ranks that sent under
        equal keys add up at the same meeting, also where one of them is in a backward inside another one. Where not
        every backward ends with a meeting, a rank may be at the end of a later one than another: what it has sent
        since waits, and it meets again.
Rule 2: a backward is a graph task. Nested backwards have their own and meet at their own end, where also what those
        around them have sent is added up; it is handed to autograd by the Packs that wait for it.
Rule 3: nothing waits for another rank's main thread before the end of the backward.
Rule 4: gradients that come from other ranks only, or from a flush, are delivered through Pack as well.
Rule 5: where a part of a sum may come later (`Strategy.comes_later`), a backward does not end with a meeting: what this
        rank knows is delivered, and the rest at the next meeting. What is seen in the backward itself, by a hook or by
        who captures it, is complete there, and may have to be met for.
Rule 6: what a backward that raised has sent is given up at the next entry. What was added up before is delivered:
        other ranks have it too. So is what others brought, and what had to go early in a window.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from retrograde.gradients.bucket import Bucket, Grads, Lone, keepable
from retrograde.gradients.gradient import Delivery, Gradient, GradientState, Leaves, uses_of
from retrograde.gradients.keys import Keys, by_key
from retrograde.gradients.landing import copy_of_sum, land_together, memory_for_sum
from retrograde.gradients.offers import accumulated, due_offers, last_due, without_withdrawn
from retrograde.gradients.strategy import Strategy
from retrograde.gradients.window import Windows
from retrograde.layout import Grid, Policy
from retrograde.ledger import Activity, Ledger
from retrograde.pages import BufferPool, Unit
from retrograde.torch_internals import at_end_of_backward, current_backward
from retrograde.transport import Key, Offers, Position, Reason, Transport, Use, Uses

MeetOthers = Callable[[Position], list[Position]]  # wait for every rank's next meeting; everybody's position, by rank


@dataclass(slots=True)
class _Backward:
    """One that runs: what it sent, what of it Pack will ask for (by unit), and what came from others."""

    sent: list[Gradient] = field(default_factory=list)
    for_pack: dict[int, Gradient] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)

    @property
    def unsummed(self) -> list[Gradient]:
        return [gradient for gradient in self.sent if gradient.state is GradientState.SENT]


class GradientFlow:
    """Owns every gradient of an engine until it is in `.grad`.

    One thread of the user's uses an engine at a time: a backward that is known here, and is not the one that runs in
    the thread that asks, has raised."""

    def __init__(
        self,
        transport: Transport,
        grid: Grid,
        strategy: Strategy,
        policy: Policy,
        pool: BufferPool,
        meet: MeetOthers,
        ledger: Ledger,
        windows: Windows,
    ) -> None:
        self._windows = windows
        self.divisor: float = 1  # of what backwards add to `.grad`; `torch.autograd.grad` is not divided
        self.fresh = False  # have gradients come since all ranks were last at the same place?
        self._transport = transport
        self._grid = grid
        self._strategy = strategy
        self._policy = policy
        self._pool = pool
        self.streams = pool.streams
        self._meet = meet
        self._ledger = ledger
        self._keys = Keys(transport)
        self._units: list[Unit] = []
        self._leaves: list[Leaves] = []
        self._backwards: dict[int, _Backward] = {}  # that run, by their graph tasks
        self._ended = 0  # since the last step
        self._orphans: list[Gradient] = []  # of backwards that have ended: they are added up at the next meeting
        self._pending: dict[int, Gradient] = {}  # added up locally, by unit

    def add(self, unit: Unit, leaves: Leaves) -> None:
        """A unit whose gradients come here."""
        self._units.append(unit)
        self._leaves.append(leaves)

    # ---- from a unit's gradients to its sum
    def collect(self, unit: Unit, grads: Grads, uses: Uses, fates: Uses, lone: Lone = ()) -> torch.Tensor | None:
        """All gradients of `unit` in this backward have arrived. Returns what Pack is to get, if anything.

        `uses`: what becomes of those that are there. `fates`: what becomes of any that come from other ranks."""
        self.streams.refuse_capture("unit {}: its gradients are collected", unit.name)
        self._note(uses)
        if not any(uses):
            return None  # `inputs=` has a parameter of this unit, on which nothing depends
        if Use.CAPTURED in uses:
            return self._to_pack(self._send_now(unit, grads, uses, 1, lone), fates)
        waits = self._may_wait(unit)
        if waits:
            waits = self._make_space(unit)  # others may have to go for it, or it does not fit
        if waits:
            self.keep(unit, grads, self.divisor, lone)
            return None
        if unit.index in self._pending:
            self.keep(unit, grads, self.divisor)  # the first backward after `no_sync()` takes along what was kept
            return self._to_pack(self._send_pending(unit.index), fates)
        return self._to_pack(self._send_now(unit, grads, uses, self.divisor, lone), fates)

    def _note(self, uses: Uses) -> None:
        if Use.ACCUMULATED in uses:
            self.fresh = True

    def _send_now(
        self, unit: Unit, grads: Grads, uses: Uses, divisor: float, lone: Lone = (), seen_at_once: bool = False
    ) -> Gradient:
        gradient = self._first(unit, unit.layout.dtype, grads, lone)
        gradient.seen_at_once = seen_at_once
        gradient.bucket.add(grads, divisor)
        return self._send(gradient, self._keys.next(unit), uses)

    def _first(self, unit: Unit, dtype: torch.dtype, grads: Grads, lone: Lone) -> Gradient:
        """With room for these, as far as they do not stay where they are."""
        self._strategy.finish_sending()  # its memory is free before more is taken
        kept = keepable(grads, lone, unit.layout, dtype) if self._strategy.takes_pieces else {}
        return Gradient(unit, Bucket(unit.name, unit.layout, dtype, self._pool, kept))

    def _send_pending(self, index: int, goes_early: bool = False) -> Gradient:
        """What was kept goes with this backward."""
        gradient = self._pending.pop(index)
        gradient.went_early = goes_early
        return self._send(gradient, self._keys.next(gradient.unit, goes_early), uses_of(gradient.bucket))

    def _send(self, gradient: Gradient, key: Key, uses: Uses) -> Gradient:
        """Within a backward, which ends when it has been added up."""
        self._launch(gradient, key, uses)
        backward = self._current()
        self._strategy.advance(backward.unsummed)
        backward.sent.append(gradient)
        return gradient

    def _launch(self, gradient: Gradient, key: Key, uses: Uses) -> None:
        unit = gradient.unit
        if self._strategy.comes_later and not gradient.seen_at_once:
            gradient.seen_at_once = Use.CAPTURED in uses or unit.hooked
        gradient.send(key, uses, memory_for_sum(unit, self.streams))
        gradient.bucket.close(self.streams.reducing)
        self._strategy.launch(gradient)
        elements = unit.layout.padded_numel - unit.shard.numel()
        nbytes = elements * self._policy.on_the_wire(gradient.bucket.dtype).itemsize
        self._ledger.record(Activity.REDUCE, unit.name, nbytes + self._bytes_to_replicas(unit))

    def _bytes_to_replicas(self, unit: Unit) -> int:
        """Of the sum that this rank sends to the other holders of its shard."""
        elements = unit.shard.numel() * (self._grid.replicas - 1)
        return elements * self._policy.between_replicas(unit.shard.dtype).itemsize

    def _to_pack(self, gradient: Gradient, fates: Uses) -> torch.Tensor:
        """What Gather hands on; Pack gets it when the ranks' parts have been added up in it."""
        self._current().for_pack[gradient.unit.index] = gradient
        gradient.reached = tuple(fate is Use.ACCUMULATED for fate in fates)
        return gradient.own

    def ready_for_pack(self, unit: Unit) -> Gradient | None:
        """Pack asks for a reduced gradient: now it is there. None: it comes at the next meeting (Rule 5)."""
        backward = self._current()
        gradient = backward.for_pack[unit.index]
        self._sum_known(backward)
        if gradient.state is GradientState.SENT and self._comes_later(gradient):
            gradient.miss_pack()
            return None
        if gradient.state is GradientState.SENT:
            self._meet_for_all([gradient], backward)
        land_together(backward.for_pack.values(), self.streams)
        gradient.deliver()
        return gradient

    def _comes_later(self, gradient: Gradient) -> bool:
        return self._strategy.comes_later and not gradient.seen_at_once

    def _sum_known(self, backward: _Backward) -> None:
        """What needs no meeting: all ranks are known to have sent it, for the same uses."""
        for gradient in backward.unsummed:
            contributors = self._strategy.contributors(gradient)
            if contributors is not None:
                backward.deliveries += self._sum(gradient, contributors)

    def _sum(self, gradient: Gradient, ranks: Mapping[int, Uses]) -> list[Delivery]:
        """Add it up; returns what no Pack of this rank waits for."""
        total = self._strategy.total(gradient, ranks)
        gradient.sum_up(accumulated(ranks))
        if not any(gradient.left_over):
            return []
        if Use.CAPTURED in gradient.uses:  # what is captured is the user's
            total = copy_of_sum(gradient.unit, total, self.streams)
        return [Delivery(gradient.unit, total, gradient.left_over)]

    def reduce_now(self, unit: Unit, grads: Grads, uses: Uses, fates: Uses | None) -> torch.Tensor:
        """Send and sum at once, for a reduction that is itself part of a graph. What is to be divided has been.

        `fates`: what Pack does with it. Without, whoever asks gets it, and all ranks ask for the same parameters."""
        self._note(uses)
        gradient = self._send_now(unit, grads, uses, divisor=1, seen_at_once=True)
        own = gradient.own if fates is None else self._to_pack(gradient, fates)
        self._sum_known(self._current())
        if gradient.state is GradientState.SENT:
            self._meet_for(gradient, uses, fates)
        if fates is None:
            gradient.deliver()
        return own

    def _meet_for(self, gradient: Gradient, uses: Uses, fates: Uses | None) -> None:
        """All ranks have sent it, or one is told that it is alone."""
        offered = self._meet_for_all([gradient], self._current())
        theirs = [of_rank.get(gradient.key) for of_rank in offered.values()]
        if None in theirs or (fates is None and any(each != uses for each in theirs)):
            self._transport.fail(
                f"rank {self._transport.rank}: a backward with create_graph=True, or for module.weight itself, reduces "
                f"unit {gradient.unit.name} at once: all ranks must be there, with gradients of the same parameters; "
                f"some were not"
            )

    # ---- a backward
    def _current(self) -> _Backward:
        number = current_backward()
        if number not in self._backwards:
            self._backwards[number] = _Backward()
            at_end_of_backward(lambda: self._close(number))
        return self._backwards[number]

    def _meet_for_all(self, gradients: Sequence[Gradient], backward: _Backward) -> dict[int, Offers]:
        """Until these have been added up. Returns what each rank had sent before the last meeting."""
        self._ended += 1
        while True:
            offers = self._meet_at_end(backward)
            if all(gradient.state is not GradientState.SENT for gradient in gradients):
                return offers

    def _meet_at_end(self, backward: _Backward) -> dict[int, Offers]:
        """All ranks meet. Returns what each has sent before it."""
        label = f"backward {self._ended} since the last step"
        offers = self.sent_offers()
        positions = self._meet(Position(Reason.BACKWARD, label, offers, {}, self._keys.backward))
        backward.deliveries += self._sum_up(positions)
        self._strategy.finish_sending()
        self._transport.meeting_is_over()
        return due_offers(positions)

    def _sum_up(self, positions: Sequence[Position]) -> list[Delivery]:
        """All that any rank has sent before this meeting; returns what no Pack of this rank waits for."""
        offers = without_withdrawn(due_offers(positions), self._transport, self._units)
        mine = {gradient.key: gradient for gradient in self._unsummed()}
        by_rank = by_key(offers)
        self._strategy.begin_sums(by_rank)
        deliveries = []
        for key, ranks in by_rank.items():
            unit, gradient = self._units[key.unit], mine.get(key)
            if gradient is None:
                deliveries.append(Delivery(unit, self._sum_of_others(unit, key, ranks), accumulated(ranks)))
                continue
            if Use.CAPTURED in gradient.uses:
                self._check_in_time(gradient)
                self._check_same_attempt(gradient, by_rank)
            deliveries += self._sum(gradient, ranks)
        self._orphans = [gradient for gradient in self._orphans if gradient.state is GradientState.SENT]
        return deliveries + self._sums_of_others(last_due(positions))

    def _sums_of_others(self, last: float) -> list[Delivery]:
        """From calls in which this rank brought nothing."""
        found = self._strategy.sums_of_others(self._units, last)
        for each in found:
            self._ledger.record(Activity.JOIN, each.unit.name, 0)
        return [Delivery(each.unit, each.total, accumulated({0: each.uses})) for each in found]

    def take_in_sums(self) -> None:
        """Ranks have come together, and this one is about to say something that depends on its gradients."""
        for delivery in self._sums_of_others(math.inf):
            self._deliver(delivery)

    def _sum_of_others(self, unit: Unit, key: Key, ranks: Mapping[int, Uses]) -> torch.Tensor:
        here = self._grid.replica in self._grid.replicas_of(ranks)
        self._ledger.record(Activity.JOIN, unit.name, self._bytes_to_replicas(unit) if here else 0)
        return self._strategy.total_of_others(unit, key, ranks)

    def _check_in_time(self, gradient: Gradient) -> None:
        """`torch.autograd.grad` returns one sum: what others ended before it cannot be added to that any more."""
        came = [
            delivery.unit
            for backward in self._backwards.values()
            if gradient in backward.sent
            for delivery in backward.deliveries
        ]
        if gradient.unit in came:
            self._transport.fail(
                f"rank {self._transport.rank}: others ended this backward before unit {gradient.unit.name} came; "
                f"make graphs for torch.autograd.grad in the same thread on all ranks"
            )

    def _check_same_attempt(self, gradient: Gradient, offered: Mapping[Key, object]) -> None:
        """For the same reason: ranks that gave up differently before it have sent under other keys."""
        attempts = {key.attempt for key in offered if key.same_but_for_attempt(gradient.key)}
        if len(attempts) > 1:
            self._transport.fail(
                f"rank {self._transport.rank}: ranks gave up different parts of backwards before torch.autograd.grad "
                f"of unit {gradient.unit.name}, so what they send now cannot be told apart from what they gave up; "
                f"give up at the same place on all ranks, or call zero_grad() or step() on all of them in between"
            )

    def _close(self, number: int) -> None:
        """Autograd says that a backward has ended."""
        backward = self._backwards.get(number)
        if backward is None:
            return  # it raised, and the next entry has cleaned up
        self._sum_known(backward)  # of what only had to go early no Pack runs
        needed = [gradient for gradient in backward.unsummed if not self._comes_later(gradient)]
        if needed:
            self._meet_for_all(needed, backward)
        self._orphans += backward.unsummed
        if backward.sent:
            self._keys.end_backward()
        del self._backwards[number]
        for delivery in backward.deliveries:
            self._deliver(delivery)

    def _deliver(self, delivery: Delivery) -> None:
        if any(delivery.wanted):
            self.fresh = True
            self._leaves[delivery.unit.index].deliver(delivery.total, delivery.wanted)

    def recover(self) -> None:
        """Clean up after backwards that raised: those that began after the one that runs now, or all if none does."""
        if not self._backwards:
            return
        running = current_backward()
        for number in [number for number in self._backwards if number > running]:
            self._abandon(self._backwards.pop(number))

    def _abandon(self, backward: _Backward) -> None:
        self._strategy.finish_sending()
        for gradient in backward.sent:
            if gradient.state is GradientState.SENT and gradient.went_early:
                backward.deliveries += self._orphan(gradient)
            elif gradient.state is GradientState.SENT:
                self._give_up(gradient)
            elif gradient.state is GradientState.SUMMED:
                gradient.deliver()
                backward.deliveries.append(Delivery(gradient.unit, gradient.own, gradient.delivered_by_pack))
        for delivery in backward.deliveries:
            self._deliver(delivery)

    def _orphan(self, gradient: Gradient) -> list[Delivery]:
        """From backwards that did not raise: it counts, now or at the next meeting."""
        contributors = self._strategy.contributors(gradient)
        if contributors is not None:
            return self._sum(gradient, contributors)
        self._orphans.append(gradient)
        return []

    def _give_up(self, gradient: Gradient) -> None:
        gradient.give_up()
        self._strategy.give_up(gradient)
        self._keys.give_up()

    # ---- pending gradients
    @property
    def bytes_waiting(self) -> dict[int, int]:
        """Bytes of unreduced gradients that wait, by unit."""
        return {index: self.waiting_bytes(self._units[index]) for index in self._pending}

    def waiting_bytes(self, unit: Unit) -> int:
        """What a gradient of this unit takes while it waits."""
        return unit.layout.padded_numel * self._policy.waiting(unit.layout.dtype).itemsize

    @property
    def comes_later(self) -> bool:
        """May what is in `.grad` lack something until ranks next meet?"""
        return self._strategy.comes_later and self.fresh

    @property
    def at_rest(self) -> bool:
        """Has every gradient arrived? Asked at each look at `p.grad`."""
        return not (self._backwards or self._pending or self._orphans)

    @property
    def waits(self) -> bool:
        """Is there anything that a flush would reduce?"""
        return bool(self._pending or self._orphans)

    def _may_wait(self, unit: Unit) -> bool:
        """In a window, or until the step: unless somebody wants to see the gradients in this backward."""
        return bool(self._windows.open) or (self._policy.until_step and not unit.hooked)

    def _make_space(self, unit: Unit) -> bool:
        """Can the gradient of `unit` wait within the budget? Others may have to go first."""
        early = self._windows.admit(unit.index, self.waiting_bytes(unit), self.bytes_waiting)
        if early is None:
            return False
        for index in early:
            self._send_pending(index, goes_early=True)
        return True

    def keep(self, unit: Unit, grads: Grads, divisor: float = 1, lone: Lone = ()) -> None:
        """Add to what waits for this unit."""
        if unit.index not in self._pending:
            dtype = self._policy.waiting(unit.layout.dtype)
            self._pending[unit.index] = self._first(unit, dtype, grads, lone)
        self._pending[unit.index].bucket.add(grads, divisor)

    def waiting_for(self, unit: Unit, slot: int) -> torch.Tensor | None:
        """What waits for one parameter, as it lies in the bucket, if something does."""
        gradient = self._pending.get(unit.index)
        return gradient.bucket.place(slot) if gradient is not None and gradient.bucket.present[slot] else None

    def forget(self, unit: Unit, slot: int) -> None:
        """`.grad` was set: what is pending for this parameter has no place to go."""
        gradient = self._pending.get(unit.index)
        if gradient is None:
            return
        gradient.bucket.present[slot] = False
        if not any(gradient.bucket.present):
            del self._pending[unit.index]
            gradient.give_up()
            gradient.bucket.discard()

    def has_pending(self, unit: Unit) -> bool:
        """Does something wait for a later reduction?"""
        return unit.index in self._pending

    # ---- meetings (coordination/coordinator.py)
    def sent_offers(self) -> Offers:
        """For the meeting to come: what it will add up."""
        self.recover()
        offers = {gradient.key: gradient.uses for gradient in self._unsummed() if not self._is_known(gradient)}
        return offers | dict.fromkeys(self._strategy.withdrawn(), ())

    def _is_known(self, gradient: Gradient) -> bool:
        """Does it need no meeting to be added up?"""
        return self._strategy.contributors(gradient) is not None

    def _unsummed(self) -> list[Gradient]:
        of_backwards = [gradient for backward in self._backwards.values() for gradient in backward.unsummed]
        return of_backwards + self._orphans

    def pending_offers(self) -> Offers:
        """For the meeting to come, which may ask for them."""
        pending = sorted(self._pending.items())
        return {self._keys.at_next_meeting(index): uses_of(gradient.bucket) for index, gradient in pending}

    def sum_sent(self, positions: Sequence[Position]) -> None:
        """After a meeting: take part in what any rank has sent."""
        for delivery in self._sum_up(positions):
            self._deliver(delivery)

    def flush(self, offers: Mapping[int, Offers]) -> None:
        """After a meeting that asks for it: bring what is pending here, take part in what is pending elsewhere. While
        one is added up the next is under way; whoever waits for others' has finished all before it."""
        under_way: deque[tuple[Gradient, Mapping[int, Uses]]] = deque()
        for key, ranks in by_key(offers).items():
            mine = ranks.get(self._transport.rank)
            if mine is None:
                self._finish_flushed(under_way, left=0)
                unit = self._units[key.unit]
                self._deliver(Delivery(unit, self._sum_of_others(unit, key, ranks), accumulated(ranks)))
                continue
            gradient = self._pending.pop(key.unit)
            self._launch(gradient, key, mine)
            under_way.append((gradient, ranks))
            self._finish_flushed(under_way, left=1)
        self._finish_flushed(under_way, left=0)
        self._strategy.finish_sending()

    def _finish_flushed(self, under_way: deque[tuple[Gradient, Mapping[int, Uses]]], left: int) -> None:
        while len(under_way) > left:
            gradient, ranks = under_way.popleft()
            total = self._strategy.total(gradient, ranks)
            gradient.sum_up(accumulated(ranks))
            gradient.deliver()
            self._deliver(Delivery(gradient.unit, total, gradient.wanted))

    def pass_step(self) -> None:
        """All ranks are at a step, and everything has been added up."""
        self._ended = 0
        self._transport.discard_parts()
        self._pool.trim()  # the optimizer may have temporaries of its own
