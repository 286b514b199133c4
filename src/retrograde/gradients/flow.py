"""The gradient flow: what happens to a gradient between its page's node and `.grad`.

[Note: the flow of gradients]
Gather's backward hands over the full gradients of a unit (graph.py). Either they are *sent*: copied once into a
bucket and put to their owners while backward goes on, or they are *pending*: added up in a local bucket until a step,
a flush or the next backward outside a window sends them. The first Pack of a backward (all Gathers have run) is its
end: ranks meet (but for Rule 5), each learns who put what, sums its shard's part and hands the pieces to autograd, so
that hooks, `inputs=`, `autograd.grad` and accumulation into `.grad` are torch's own. (Autograd runs nodes with higher
numbers first, and Pack has 0. But every thread numbers its nodes from 0: of a graph made in a new thread a Gather may
be left when a Pack runs, and then there is another end.)

Rule 1: what a rank has sent is added up at its next meeting, whatever the meeting is for. So ranks that sent under
        equal keys add up at the same meeting, also where one of them is in a backward inside another one. Where not
        every backward ends with a meeting, a rank may be at the end of a later one than another: what it has sent
        since waits, and it meets again.
Rule 2: a backward is a graph task. Nested backwards have their own and meet at their own end, where also what those
        around them have sent is added up; it is handed to autograd by the Packs that wait for it.
Rule 3: nothing waits for another rank's main thread before the end of the backward.
Rule 4: gradients that come from other ranks only, or that waited, are delivered through Pack as well.
Rule 5: where a part of a sum may come later (`Strategy.comes_later`), a backward does not end with a meeting: what this
        rank knows is delivered, and the rest at the next meeting. What is seen in the backward itself, by a hook or by
        who captures it, is complete there, and may have to be met for.
Rule 6: what a backward that raised has sent is given up at the next entry. What was added up before is delivered:
        other ranks have it too. So is what others brought, and what had to go early in a window.

What this file decides is done by others: what waits is in pending.py, launches and sums are in reducer.py, the
backwards that run, their meetings and their ends in backwards.py, the way to the leaves outside of a Pack in
deliveries.py.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from retrograde.gradients.backwards import Backwards
from retrograde.gradients.bucket import Grads, Lone
from retrograde.gradients.deliveries import Deliveries
from retrograde.gradients.gradient import Delivery, Gradient, GradientState, uses_of
from retrograde.gradients.keys import by_key
from retrograde.gradients.landing import land_together
from retrograde.gradients.pending import PendingGradients
from retrograde.gradients.reducer import Reducer
from retrograde.gradients.strategy import Strategy
from retrograde.layout import Grid
from retrograde.pages import BufferPool, Unit
from retrograde.transport import Offers, Position, Use, Uses, Value


class GradientFlow:
    """Moves every gradient of an engine from its unit's node to `.grad`."""

    def __init__(
        self,
        grid: Grid,
        pool: BufferPool,
        strategy: Strategy,
        reducer: Reducer,
        deliveries: Deliveries,
        backwards: Backwards,
        pending: PendingGradients,
    ) -> None:
        self.divisor: float = 1  # of what backwards add to `.grad`; `torch.autograd.grad` is not divided
        self.streams = pool.streams
        self._grid = grid
        self._pool = pool
        self._strategy = strategy
        self._reducer = reducer
        self._deliveries = deliveries
        self._backwards = backwards
        self._pending = pending

    # ---- in a backward: a unit's gradients are sent, or wait
    def collect(self, unit: Unit, grads: Grads, uses: Uses, fates: Uses, lone: Lone = ()) -> torch.Tensor | None:
        """Take the gradients of `unit`, all of which have arrived in this backward. Returns what Pack is to get, if
        anything.

        `uses`: what this backward does with the gradients that are there. `fates`: what it would do with any, also with
        those that come from other ranks."""
        self.streams.refuse_capture("unit {}: its gradients are collected", unit.name)
        self._deliveries.note(uses)
        if not any(uses):
            return None  # `inputs=` has a parameter of this unit, on which nothing depends
        if Use.CAPTURED in uses:
            return self._to_pack(self._send_now(unit, grads, uses, 1, lone), fates)
        waits = self._pending.may_wait(unit)
        if waits:
            waits = self._make_space(unit)  # others may have to go for it, or it does not fit
        if waits:
            self._pending.keep(unit, grads, self.divisor, lone)
            return None
        if self._pending.has(unit):
            self._pending.keep(unit, grads, self.divisor)  # the first backward after `no_sync()` takes it along
            return self._to_pack(self._send_pending(unit.index), fates)
        return self._to_pack(self._send_now(unit, grads, uses, self.divisor, lone), fates)

    def _make_space(self, unit: Unit) -> bool:
        """Make room within the budget for the gradient of `unit` to wait, by sending others early.
        Returns whether it can wait."""
        early = self._pending.admit(unit)
        if early is None:
            return False
        for index in early:
            self._send_pending(index, goes_early=True)
        return True

    def _send_now(
        self, unit: Unit, grads: Grads, uses: Uses, divisor: float, lone: Lone = (), seen_at_once: bool = False
    ) -> Gradient:
        gradient = self._reducer.first(unit, unit.layout.dtype, grads, lone)
        gradient.seen_at_once = seen_at_once
        gradient.bucket.add(grads, divisor)
        return self._backwards.send(gradient, uses)

    def _send_pending(self, index: int, goes_early: bool = False) -> Gradient:
        """Send the gradient of a unit that waited with the backward that runs now."""
        gradient = self._pending.take(index)
        return self._backwards.send(gradient, uses_of(gradient.bucket), goes_early)

    def _to_pack(self, gradient: Gradient, fates: Uses) -> torch.Tensor:
        """Note that Pack will ask for this gradient. Returns the memory that Gather hands on to Pack, in which the
        ranks' parts will have been added up by then."""
        self._backwards.current().for_pack[gradient.unit.index] = gradient
        gradient.reached = tuple(fate is Use.ACCUMULATED for fate in fates)
        return gradient.own

    # ---- at its end: what was sent is added up, and goes to the leaves
    def ready_for_pack(self, unit: Unit) -> Gradient | None:
        """The reduced gradient for which Pack asks, added up now at the latest.
        None: it comes at the next meeting (Rule 5)."""
        backward = self._backwards.current()
        gradient = backward.for_pack[unit.index]
        self._backwards.sum_known(backward)
        if gradient.state is GradientState.SENT and self._reducer.comes_later(gradient):
            gradient.miss_pack()
            return None
        if gradient.state is GradientState.SENT:
            self._backwards.meet_for([gradient], backward)
        land_together(backward.for_pack.values(), self.streams)
        gradient.deliver()
        return gradient

    def reduce_now(self, unit: Unit, grads: Grads, uses: Uses, fates: Uses | None) -> torch.Tensor:
        """Send a gradient and add it up at once, for a reduction that is itself part of a graph. It has been divided
        already.

        `fates`: what Pack does with it. None: the caller gets the sum, and all ranks ask for the same parameters."""
        self._deliveries.note(uses)
        gradient = self._send_now(unit, grads, uses, divisor=1, seen_at_once=True)
        own = gradient.own if fates is None else self._to_pack(gradient, fates)
        self._backwards.sum_known(self._backwards.current())
        if gradient.state is GradientState.SENT:
            self._backwards.meet_at_once(gradient, must_be_alike=fates is None)
        if fates is None:
            gradient.deliver()
        return own

    # ---- between backwards: what is still to come
    def recover(self) -> None:
        """Clean up after backwards that raised."""
        self._backwards.recover()

    @property
    def at_rest(self) -> bool:
        """Has every gradient arrived? Asked at each look at `p.grad`."""
        return not (self._backwards.running or self._pending.gradients or self._backwards.orphans)

    @property
    def waits(self) -> bool:
        """Is there anything that a flush would reduce?"""
        return bool(self._pending.gradients or self._backwards.orphans)

    @property
    def fresh(self) -> bool:
        """Have gradients come since all ranks were last at the same place?"""
        return self._deliveries.fresh

    @property
    def comes_later(self) -> bool:
        """May what is in `.grad` lack something until ranks next meet?"""
        return self._strategy.comes_later and self._deliveries.fresh

    # ---- at meetings (coordination/coordinator.py): what waited is added up
    def sent_offers(self) -> Offers:
        """This rank's offers of gradients that it has sent and the next meeting adds up."""
        return self._backwards.offers()

    def pending_offers(self) -> Offers:
        """This rank's offers of gradients that wait, for which the next meeting may ask."""
        return self._pending.offers()

    def hooked_units(self) -> Value:
        """What this rank says at a meeting for a step: its units with hooks. None: there are none, or nothing waits for
        that meeting."""
        return None if self.sends_pending else self._reducer.hooked_units() or None

    def take_in_sums(self) -> None:
        """Deliver the sums of calls in which this rank brought nothing: ranks have come together, and this one is about
        to say something that depends on its gradients."""
        self._backwards.take_in_sums()

    def deliveries_completed(self) -> AbstractContextManager[None]:
        """A span in which all deliveries are made, whatever hooks raise: the first error is raised at its end."""
        return self._deliveries.completed()

    def sum_sent(self, positions: Sequence[Position]) -> None:
        """After a meeting: add up and deliver what any rank has sent before it."""
        self._backwards.sum_sent(positions)

    @property
    def sends_pending(self) -> bool:
        """Is what waits sent without a meeting that asks for it?"""
        return self._strategy.knows_contributors

    def send_pending(self) -> None:
        """Send what waits, at a place to which all ranks come, if that needs no meeting."""
        if self.sends_pending:
            self._backwards.send_between(self._pending.take_all())

    def flush(self, offers: Mapping[int, Offers]) -> None:
        """After a meeting that asks for it: send and add up what is pending here, and take part in sums of what is
        pending only elsewhere. While one gradient is added up the next is under way; before a sum to which this rank
        brings nothing, all its own are finished."""
        self._deliveries.deliver_all(self._flushed(offers))
        self._strategy.finish_sending()

    def _flushed(self, offers: Mapping[int, Offers]) -> Iterator[Delivery]:
        under_way: deque[tuple[Gradient, Mapping[int, Uses]]] = deque()
        for key, ranks in by_key(offers).items():
            mine = ranks.get(self._grid.rank)
            if mine is None:
                yield from self._finish_flushed(under_way, left=0)
                yield self._reducer.sum_of_others(key, ranks)
                continue
            gradient = self._pending.take(key.unit)
            self._reducer.launch(gradient, key, mine)
            under_way.append((gradient, ranks))
            yield from self._finish_flushed(under_way, left=1)
        yield from self._finish_flushed(under_way, left=0)

    def _finish_flushed(self, under_way: deque[tuple[Gradient, Mapping[int, Uses]]], left: int) -> Iterator[Delivery]:
        while len(under_way) > left:
            gradient, ranks = under_way.popleft()
            yield self._reducer.sum_without_pack(gradient, ranks)

    def pass_step(self) -> None:
        """Forget what belongs to the step that ends: all ranks are at it, and everything has been added up."""
        self._backwards.pass_step()
        self._pool.trim()  # the optimizer may have temporaries of its own

    def note_same_place(self) -> None:
        """Note that all ranks are at the same place, with all gradients that came before it."""
        self._deliveries.fresh = False
