"""`torch.tensor(p)` and others that copy a tensor's elements elsewhere: the whole, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.idioms import batch, net, weight
from tests.stages import EACH_STAGE

COPIES: dict[str, Callable[[Tensor], Any]] = {
    "torch.tensor": lambda tensor: torch.tensor(tensor),  # looked up in torch when it is called, as a program does
    "torch.tensor, by name": lambda tensor: torch.tensor(data=tensor, dtype=torch.double),
    "torch.as_tensor, as double": lambda tensor: torch.as_tensor(tensor, dtype=torch.double),
    "torch.asarray, a copy": lambda tensor: torch.asarray(tensor, copy=True),
    "to_dlpack": lambda tensor: torch.from_dlpack(torch.to_dlpack(tensor.detach())),
    "torch.utils.dlpack": lambda tensor: torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor.detach())),
    "numpy.asarray": lambda tensor: np.asarray(tensor.detach()),
    "numpy.array, as double": lambda tensor: np.array(tensor.detach(), dtype=np.float64),
    "numpy()": lambda tensor: tensor.detach().numpy(),
    "numpy(force=True)": lambda tensor: tensor.numpy(force=True),
    "tolist()": lambda tensor: tensor.tolist(),
    "list(p)": lambda tensor: [row.tolist() for row in tensor],
}


def _differ(rank: int, world: int, stage: int) -> list[str]:
    """The copies that are not the whole's, of a parameter, its data, its gradient and what is computed from it."""
    model = net()
    rg.shard(model, stage)
    model(batch(rank)).sum().backward()
    param = weight(model)
    grad = param.grad
    faults = []
    for kind, tensor in {"p": param, "p.data": param.data, "p.grad": grad, "2 * p.grad": grad * 2}.items():
        plain = torch.empty(8, 8).copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch would have us clone
            for name, copied in COPIES.items():
                ours, wanted = copied(tensor), copied(plain)
                alike = type(ours) is type(wanted) and np.array_equal(_elements(ours), _elements(wanted))
                if not alike or getattr(ours, "requires_grad", None) != getattr(wanted, "requires_grad", None):
                    faults.append(f"{name} of {kind}")
        if torch.as_tensor(tensor) is not tensor or torch.asarray(tensor, dtype=tensor.dtype) is not tensor:
            faults.append(f"what is there already, of {kind}")
    dist.barrier()
    return faults


def _elements(copied: Any) -> Any:
    return copied.detach().numpy() if isinstance(copied, Tensor) else copied


@EACH_STAGE
def test_copies_are_of_the_whole(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_differ, stage) == [[], []]


def _in_graph(rank: int, world: int) -> bool:
    """`as_tensor` stays in the graph, as in torch."""
    model = net()
    rg.shard(model, 3)
    torch.as_tensor(weight(model), dtype=torch.double).sum().backward()
    same = torch.equal(weight(model).grad.full_tensor(), torch.ones(8, 8))
    dist.barrier()
    return same


def test_a_conversion_in_a_graph(ranks: Ranks) -> None:
    assert ranks(2).run(_in_graph) == [True, True]


# ---- everybody else's tensors
def scripted(x: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 2.0]) + torch.as_tensor([3.0, 4.0])


def scripted_later(x: Tensor) -> Tensor:
    return x + torch.tensor([1.0, 2.0]) + torch.as_tensor([3.0, 4.0])


def _as_ever(rank: int, world: int, before: bool) -> list[Any]:
    """Whoever knows torch's functions by their identity, asked before a model is sharded or not."""
    if before:
        _by_identity(scripted)
    rg.shard(net(), 3)
    found = _by_identity(scripted_later)
    dist.barrier()
    return found


def _by_identity(function: Callable[[Tensor], Tensor]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript
        found = [torch.jit.script(function)(torch.zeros(2)).tolist()]
    found.append(torch.compile(function, backend="eager", fullgraph=True)(torch.zeros(2)).tolist())
    with torch.device("meta"):
        return [*found, torch.tensor([1]).device.type, torch.asarray([1]).device.type]


@pytest.mark.parametrize("before", (True, False))
def test_others_find_what_they_know(ranks: Ranks, before: bool) -> None:
    assert ranks(1).run(_as_ever, before) == [[[4.0, 6.0], [4.0, 6.0], "meta", "meta"]]
