"""Exchanges where there are several replicas of a model: of parts within a replica, of sums between replicas.

    rank 0 ── g0 g1 ──> g0 + g1 ──┐
    rank 1                        ├──> (g0 + g1) + (g2 + g3), on all that hold the shard
    rank 2 ── g2 g3 ──> g2 + g3 ──┘
    rank 3

Each replica's ranks are added up in the order of shards, and then replicas in their own order, as one by one
(strategy.py, [Note: exactness]): all holders of a shard add the same numbers in the same order.
"""

import torch

from retrograde.devices import Stream
from retrograde.gradients.collective_calls import Attendance, StartedCall, shards_of
from retrograde.gradients.sums import Summand, add_up
from retrograde.layout import Grid, Policy
from retrograde.pages import Unit
from retrograde.transport import GradientWant, OrderedTransport, ReplicaExchange


class ExchangeOfSums:
    """Implements `CallKind`: replicas' sums come apart, and are added up here."""

    comes_later = False
    brings_sum = False

    def __init__(self, transport: OrderedTransport, grid: Grid, policy: Policy, stream: Stream) -> None:
        """`stream`: the reducing stream."""
        self._transport = transport
        self._grid = grid
        self._policy = policy
        self._stream = stream

    def numel(self, unit: Unit) -> int:
        """The elements of this replica's parts.
        They are kept until it is known that no rank was absent in any replica."""
        return unit.layout.padded_numel

    def start(self, want: GradientWant, unit: Unit, sent: torch.Tensor, brought: torch.Tensor) -> StartedCall | None:
        numel = unit.shard.numel()
        sums = self._stream.empty(self._grid.replicas * numel, self._policy.between_replicas(unit.shard.dtype))
        own = sums[self._grid.replica * numel :][:numel]
        parts = shards_of(brought, unit)
        offered = ReplicaExchange(
            sent, brought, lambda: _add_up_replica(parts, own, unit.shard.dtype, self._stream), own, sums
        )
        work = self._transport.exchange_sums(want, offered)
        return None if work is None else StartedCall(work, sums)

    def attendance(self, want: GradientWant) -> Attendance:
        """ALL after a meeting, since nobody is absent there; else nobody knows yet."""
        return Attendance.ALL if want.at_meeting else Attendance.UNKNOWN

    def summands(self, apart: torch.Tensor, unit: Unit) -> list[Summand]:
        """The sums of the replicas, in their order."""
        return shards_of(apart, unit)


def _add_up_replica(parts: list[Summand], own: torch.Tensor, dtype: torch.dtype, stream: Stream) -> None:
    """Add up a replica's parts as `OrderedSum` does, and round the sum into `own`, in whose dtype it travels.
    `dtype`: the shard's."""
    wide = torch.promote_types(dtype, torch.float32)
    total = own if own.dtype == wide else stream.empty(own.numel(), wide)
    add_up(parts, total, 1, stream)
    if total is not own:
        stream.run(lambda: own.copy_(total))
