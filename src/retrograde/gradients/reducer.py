"""Takes a unit's gradient on this rank to the sum over all ranks, by a strategy,
and records each reduction in the ledger."""

from collections.abc import Mapping, Sequence

import torch

from retrograde.gradients.bucket import Bucket, Grads, Lone, keepable
from retrograde.gradients.gradient import Delivery, Gradient
from retrograde.gradients.landing import copy_of_sum, memory_for_sum
from retrograde.gradients.offers import accumulated
from retrograde.gradients.strategy import Strategy
from retrograde.layout import Grid, Policy
from retrograde.ledger import Activity, Ledger
from retrograde.pages import BufferPool, Unit
from retrograde.transport import Key, Use, Uses


class Reducer:
    """Launches gradients and adds them up; what no Pack of this rank waits for it returns as deliveries."""

    def __init__(
        self, grid: Grid, units: Sequence[Unit], policy: Policy, strategy: Strategy, pool: BufferPool, ledger: Ledger
    ) -> None:
        """`units`: the engine's list, to which others may be added."""
        self._grid = grid
        self._units = units
        self._policy = policy
        self._strategy = strategy
        self._pool = pool
        self._streams = pool.streams
        self._ledger = ledger
        self._any_hooked = False

    def begin_backward(self) -> None:
        """With replicas, look for units with hooks: if there is one, no part of any sum may come later in this
        backward. For what a hook sees some ranks meet earlier than others, and holders of the same shard must add to
        `.grad` in one order."""
        several = self._strategy.comes_later and self._grid.replicas > 1
        self._any_hooked = several and any(unit.hooked for unit in self._units)

    def hooked_units(self) -> list[int]:
        """The units for whose gradients somebody on this rank waits, by index."""
        return [unit.index for unit in self._units if unit.hooked]

    # ---- to the other ranks
    def first(self, unit: Unit, dtype: torch.dtype, grads: Grads, lone: Lone) -> Gradient:
        """Make a gradient whose bucket has room for `grads`,
        except for those that can stay where autograd left them."""
        self._strategy.finish_sending()  # its memory is free before more is taken
        kept = keepable(grads, lone, unit.layout, dtype) if self._strategy.takes_pieces else {}
        return Gradient(unit, Bucket(unit.name, unit.layout, dtype, self._pool, kept))

    def launch(self, gradient: Gradient, key: Key, uses: Uses) -> None:
        unit = gradient.unit
        if self.comes_later(gradient):
            gradient.seen_at_once = Use.CAPTURED in uses or unit.hooked or self._any_hooked
        gradient.send(key, uses, memory_for_sum(unit, self._streams))
        gradient.bucket.close(self._streams.reducing)
        self._strategy.launch(gradient)
        elements = unit.layout.padded_numel - unit.shard.numel()
        nbytes = elements * self._policy.on_the_wire(gradient.bucket.dtype).itemsize
        self._ledger.record(Activity.REDUCE, unit.name, nbytes + self._bytes_to_replicas(unit))

    def _bytes_to_replicas(self, unit: Unit) -> int:
        """The bytes of sums that this rank sends to the other holders of its shard."""
        elements = unit.shard.numel() * (self._grid.replicas - 1)
        return elements * self._policy.between_replicas(unit.shard.dtype).itemsize

    # ---- sums
    def comes_later(self, gradient: Gradient) -> bool:
        """May a part of this gradient's sum come at the next meeting, after the backward (flow.py, Rule 5)?"""
        return self._strategy.comes_later and not gradient.seen_at_once

    def sum(self, gradient: Gradient, ranks: Mapping[int, Uses]) -> list[Delivery]:
        """Add up what these ranks have sent; returns what no Pack of this rank waits for."""
        total = self._strategy.total(gradient, ranks)
        gradient.sum_up(accumulated(ranks))
        if not any(gradient.left_over):
            return []
        if Use.CAPTURED in gradient.uses:  # what is captured is the user's
            total = copy_of_sum(gradient.unit, total, self._streams)
        return [Delivery(gradient.unit, total, gradient.left_over)]

    def sum_without_pack(self, gradient: Gradient, ranks: Mapping[int, Uses]) -> Delivery:
        """Add up a gradient that waited. It is returned as a delivery, since no backward hands it to Pack."""
        total = self._strategy.total(gradient, ranks)
        gradient.sum_up(accumulated(ranks))
        gradient.deliver()
        return Delivery(gradient.unit, total, gradient.wanted)

    # ---- sums of others
    def sum_of_others(self, key: Key, ranks: Mapping[int, Uses]) -> Delivery:
        """Take part in the sum of a gradient that this rank has not sent."""
        unit = self._units[key.unit]
        here = self._grid.replica in self._grid.replicas_of(ranks)
        self._ledger.record(Activity.JOIN, unit.name, self._bytes_to_replicas(unit) if here else 0)
        return Delivery(unit, self._strategy.total_of_others(unit, key, ranks), accumulated(ranks))

    def sums_of_others(self) -> list[Delivery]:
        """The sums of calls in which this rank brought nothing, as deliveries."""
        found = self._strategy.sums_of_others(self._units)
        for each in found:
            self._ledger.record(Activity.JOIN, each.unit.name, 0)
        return [Delivery(each.unit, each.total, accumulated({0: each.uses})) for each in found]
