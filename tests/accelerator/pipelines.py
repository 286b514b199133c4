"""Pipelines on the test device against plain torch on the CPU, whose kernels it has."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import retrograde as rg
from retrograde.devices import HAPPENED, Event, streams_of
from retrograde.devices.streams import DeviceStream
from retrograde.pipeline import Action
from retrograde.pipeline.payload import layout_of
from retrograde.transport import Parts, ProcessRanks, Way
from retrograde.transport.lanes import Lane, Received
from retrograde.transport.messages import Address, Form
from tests.accelerator import device
from tests.pipeline.cases import CASES, Case, Data, backward_order, compare, lin, plain_step, replicas_step, tanhs

STEPS = 2


def steps(rank: int, world: int, schedule: str, names: Sequence[str], mode: str, seed: int) -> list[str]:
    """Two steps of each case, the second on top of the first: what differs, and what the host waited for in them."""
    where = device.of_rank(rank)
    wrong = []
    for name in names:
        torch.manual_seed(0)
        case = CASES[name]
        blocks = case.blocks()
        pipe = pipeline_of(case, blocks, where, schedule)
        batches = [case.data() for _ in range(STEPS)]
        order = backward_order(pipe.schedule)
        wanted = [plain_step(blocks, data, case.loss, order) for data in batches]
        with device.use(mode, seed), torch.device(where):
            losses = [step(pipe, data, where) for data in batches]
            waits = device.synchronisations()
            if waits:
                wrong.append(f"{name}: the host waited for {waits}")
            wrong += [
                f"{name}: step {number}: loss {found}, torch {want}"
                for number, (found, want) in enumerate(zip(map(_host, losses), wanted, strict=True))
                if not case.same(found, want)
            ]
            wrong += compare(name, pipe, blocks, case)
        dist.barrier()
    return wrong


def pipeline_of(case: Case, blocks: list[nn.Module], where: torch.device, schedule: str, **options: Any) -> rg.Pipeline:
    moved = list(device.move(nn.ModuleList(copy.deepcopy(blocks)), where))
    return rg.Pipeline(moved, schedule=schedule, microbatches=4, loss=case.loss, **options)


def step(pipe: rg.Pipeline, data: Data, where: torch.device) -> Tensor:
    args, target, options = pytree.tree_map_only(Tensor, lambda t: sent(t, where), tuple(data))
    return pipe.step(*(args if 0 in pipe.stages else ()), target=target, **options)


def sent(tensor: Tensor, where: torch.device) -> Tensor:
    """Without waiting."""
    return tensor.pin_memory().to(where, non_blocking=True)


def _host(tensor: Tensor) -> Tensor:
    with torch.device("cpu"):
        return tensor.cpu()


# ---- mistakes that have to be found
def races_without(rank: int, world: int, mistake: str) -> list[str]:
    """What the checker finds in a step, if the channel forgets something."""
    where = device.of_rank(rank)
    torch.manual_seed(0)
    case = CASES["transformer"]
    pipe = pipeline_of(case, case.blocks(), where, "zb-h1")
    data = case.data()
    with device.use("lazy"), MISTAKES[mistake]():
        step(pipe, data, where)
        torch.accelerator.synchronize()
        found = device.races()
    dist.barrier()
    return found


def _send_without_event(lane: Lane, tensors: Sequence[Tensor], made: Event) -> None:
    SEND(lane, tensors, HAPPENED)


SEND = Lane.send
MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "the receiver's wait": lambda: mock.patch.object(Received, "wait", lambda self, stream: None),
    "the sender's event": lambda: mock.patch.object(Lane, "send", _send_without_event),
    "the holding of memory": lambda: mock.patch.object(DeviceStream, "hold", lambda self, tensor: None),
}


# ---- one message
def mixed_message(rank: int, world: int, mode: str, seed: int) -> list[Any]:
    """Tensors of the device and of the host, without elements and with gaps."""
    where = device.of_rank(rank)
    assert dist.group.WORLD is not None
    streams = streams_of(where)
    channel = ProcessRanks(dist.group.WORLD).channel(streams, 20.0, [Way(0, 1), Way(1, 0)])
    dist.barrier()
    address, got = Address(True, 0, 0), None
    with device.use(mode, seed):
        if rank == 0:
            grid = torch.arange(12.0).to(where).view(3, 4)
            tensors = [grid.t(), grid[:, ::2], None, torch.arange(3), grid[:0], grid.bfloat16()]
            layouts = tuple(None if tensor is None else layout_of(tensor) for tensor in tensors)
            channel.send(1, address, Parts(Form(layouts, None), tensors))
            del tensors, grid
        else:
            parts = channel.receive(0, address).wait(streams.current())
            waits = device.synchronisations()
            assert parts is not None
            got = [None if t is None else (str(t.device), t.stride(), t.cpu()) for t in parts.tensors]
            got.append(waits)
    dist.barrier()
    return got or []


# ---- ZeRO under it
def zero_steps(rank: int, world: int, schedule: str, stage: int, mode: str) -> list[str]:
    where = device.of_rank(rank)
    mesh = init_device_mesh(where.type, (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    case = CASES["transformer"]
    blocks = case.blocks()
    zero = rg.Zero(stage=stage, mesh=mesh["dp"])
    pipe = pipeline_of(case, blocks, where, schedule, mesh=mesh["pp"], zero=zero)
    wanted = replicas_step(case, blocks, backward_order(pipe.schedule), 2, 10)
    torch.manual_seed(10 + mesh["dp"].get_local_rank())
    data = case.data()
    wrong = []
    with device.use(mode):
        step(pipe, data, where)
        waits = device.synchronisations()
        if waits:
            wrong.append(f"the host waited for {waits}")
        assert pipe.engine is not None
        for name, leaf in pipe.named_parameters():
            whole = pipe.engine.full_grad(leaf)
            if whole is None or not torch.equal(whole.cpu(), wanted[name]):
                wrong.append(f"{name} differs")
    dist.barrier()
    return wrong


# ---- W that computes again
def random_states(rank: int, world: int) -> tuple[list[int], list[str]]:
    """Which states of the device's generator W set, of those that forwards found: it has none, so they are numbered."""
    where = device.of_rank(rank)
    torch.manual_seed(0)
    case = CASES["plain"]
    blocks = case.blocks()
    pipe = pipeline_of(case, blocks, where, "zb-h1", pending=0)
    data = case.data()
    plain_step(blocks, data, case.loss, backward_order(pipe.schedule))
    found: list[Tensor] = []
    set_to: list[Tensor] = []

    def get(of: torch.device) -> Tensor:
        assert of == where
        found.append(torch.zeros(len(found)))
        return found[-1]

    module = torch.get_device_module(where)
    with mock.patch.multiple(module, get_rng_state=get, set_rng_state=lambda state, of: set_to.append(state)):
        step(pipe, data, where)
    wrong = compare("", pipe, blocks, case)
    dist.barrier()
    return [len(state) for state in set_to], wrong


# ---- what goes wrong
class Failing(nn.Module):
    """Raises in the second forward of a step, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a = lin()
        self.left: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise ValueError("a trap")
        return torch.tanh(self.a(x))


def fail_then_recover(rank: int, world: int, schedule: str, mode: str) -> tuple[str, list[str]]:
    where = device.of_rank(rank)
    torch.manual_seed(0)
    case = Case(lambda: [*tanhs(5), Failing(), *tanhs(2)])
    blocks = case.blocks()
    pipe = pipeline_of(case, blocks, where, schedule)
    data = case.data()
    traps = [module for stage in pipe.modules() for module in stage.modules() if isinstance(module, Failing)]
    with device.use(mode):
        for trap in traps:
            trap.left = 2
        with pytest.raises(rg.PipelineError) as caught:
            step(pipe, data, where)
        for parameter in pipe.parameters():
            parameter.grad = None
        for trap in traps:
            trap.left = None
        step(pipe, data, where)
        plain_step(blocks, data, case.loss, backward_order(pipe.schedule))
        wrong = compare("", pipe, blocks, case)
    dist.barrier()
    return str(caught.value), wrong


def step_with_a_death(rank: int, world: int) -> None:
    """Rank 1 ends in its second step, without a word."""
    where = device.of_rank(rank)
    torch.manual_seed(0)
    case = CASES["plain"]
    pipe = pipeline_of(case, case.blocks(), where, "zb-h1")
    data = case.data()
    step(pipe, data, where)

    def end(action: Action) -> None:
        if str(action) == "1F1":
            os._exit(7)

    if rank == 1:
        pipe.watch(end)
    for text in ("the connection to rank 1 was lost", "lost a rank in an earlier step, start the job again"):
        with pytest.raises(rg.PipelineError, match=text):
            step(pipe, data, where)
    os._exit(0)


# ---- ties
def tied_steps(rank: int, world: int, mode: str) -> tuple[list[str], dict[str, int]]:
    """What differs, and what the host waited for: sums of ties are staged in its memory."""
    where = device.of_rank(rank)
    torch.manual_seed(0)
    case = CASES["tied at both ends"]
    blocks = case.blocks()
    pipe = pipeline_of(case, blocks, where, "1f1b")
    data = case.data()
    plain_step(blocks, data, case.loss, backward_order(pipe.schedule))
    with device.use(mode):
        step(pipe, data, where)
        waits = device.synchronisations()
        wrong = compare("", pipe, blocks, case)
    dist.barrier()
    return wrong, waits
