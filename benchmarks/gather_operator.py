"""The road not taken by torch.compile support: the gather as an operator inside one graph of the whole model.

An engine of its own on plain collectives, for `compiled_memory`: each part of the model is one flat shard, which an
opaque operator gathers and whose gradient another one reduces. If asked to, a selective checkpoint around each part has
the partitioner gather again in backward instead of saving what was gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


@dataclass
class Pages:
    """What the operators gathered: how often, and the most bytes that were alive at once."""

    gathers: int = 0
    most: int = 0
    _alive: list[tuple[StorageWeakRef, int]] = field(default_factory=list)

    def forget(self) -> None:
        self.gathers = 0
        self.most = 0

    def add(self, page: Tensor) -> None:
        self.gathers += 1
        self._alive = [(ref, size) for ref, size in self._alive if not ref.expired()]
        self._alive.append((StorageWeakRef(page.untyped_storage()), page.untyped_storage().nbytes()))
        self.most = max(self.most, sum(size for _, size in self._alive))


PAGES = Pages()


@functools.cache
def _wire(numel: int) -> tuple[Tensor, Tensor]:
    """A whole and a part for a collective to work on. Its threads may hold tensors a little longer than the call."""
    return torch.empty(numel), torch.empty(numel // dist.get_world_size())


@torch.library.custom_op("retrograde_bench::gather", mutates_args=())
def gather(shard: Tensor) -> Tensor:
    whole, part = _wire(shard.numel() * dist.get_world_size())
    dist.all_gather_single(whole, part.copy_(shard))
    page = whole.clone()
    PAGES.add(page)
    return page


@torch.library.custom_op("retrograde_bench::reduce", mutates_args=())
def reduce(grad: Tensor) -> Tensor:
    whole, part = _wire(grad.numel())
    dist.reduce_scatter_single(part, whole.copy_(grad))
    return part.clone()


@gather.register_fake
def _(shard: Tensor) -> Tensor:
    return shard.new_empty(shard.numel() * dist.get_world_size())


@reduce.register_fake
def _(grad: Tensor) -> Tensor:
    return grad.new_empty(grad.numel() // dist.get_world_size())


gather.register_autograd(lambda ctx, grad: torch.ops.retrograde_bench.reduce(grad))


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Pages and views of them are made again; everything else is kept, as without a checkpoint."""
    again = op is torch.ops.retrograde_bench.gather.default or op.is_view
    return CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE


class Gathered(nn.Module):
    """`module` with one flat shard instead of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        world = dist.get_world_size()
        named = dict(module.named_parameters())
        flat = torch.cat([p.detach().reshape(-1) for p in named.values()])
        flat = nn.functional.pad(flat, (0, -flat.numel() % world))
        self.shard = nn.Parameter(flat.view(world, -1)[dist.get_rank()].clone())
        self.names = list(named)
        self.shapes = [p.shape for p in named.values()]
        self.rest = flat.numel() - sum(shape.numel() for shape in self.shapes)
        self.skeleton = [module.to("meta")]  # in a list: its parameters are not this module's

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.ops.retrograde_bench.gather(self.shard).split([*(s.numel() for s in self.shapes), self.rest])
        full = {name: part.view(shape) for name, part, shape in zip(self.names, parts, self.shapes, strict=False)}
        return torch.func.functional_call(self.skeleton[0], full, (x,))


class Whole(nn.Module):
    """The parts one after the other, each a unit; `again`: pages are gathered again in backward."""

    def __init__(self, parts: Sequence[nn.Module], again: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Gathered(part) for part in parts)
        self.run: Callable[..., Any] = self._recomputed if again else self._called

    @staticmethod
    def _called(part: nn.Module, x: Tensor) -> Tensor:
        return part(x)

    @staticmethod
    def _recomputed(part: nn.Module, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(part, x, use_reentrant=False, context_fn=contexts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = self.run(part, x)
        return x
