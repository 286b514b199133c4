"""`optimizer.state_dict()` and `load_state_dict()` over sharded parameters: a state is this rank's, is cut to it, or is
refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.files import through_a_file
from tests.multiproc.twin import Twin
from tests.small import batch, build, loss_of
from tests.stages import EACH_STAGE

State = dict[str, Any]


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=2**-6, foreach=False)


def scaled_sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2**-4, momentum=2**-1, foreach=True)


OPTIMIZERS = pytest.mark.parametrize("make", (adam, scaled_sgd), ids=lambda make: make.__name__)


def small_steps(twin: Twin, first: int, count: int) -> None:
    for step in range(first, first + count):
        twin.train(step)


# ---- what fits
def _own(rank: int, world: int, stage: int, make: Any) -> None:
    """A rank's own state, through a file, into another optimizer of the same model."""
    twin = Twin(rank, world, stage)
    twin.optimize(make)
    small_steps(twin, 0, 2)
    plain, ours = (through_a_file(optimizer.state_dict()) for optimizer in twin.optimizers)
    assert plain.keys() == ours.keys() == {"state", "param_groups"}
    assert [list(each) for each in ours["state"].values()] == [list(each) for each in plain["state"].values()]
    twin.optimizers = []
    twin.optimize(make)
    for optimizer, state in zip(twin.optimizers, (plain, ours), strict=True):
        optimizer.load_state_dict(state)
    small_steps(twin, 2, 2)
    twin.check_weights()
    twin.close()


@OPTIMIZERS
@EACH_STAGE
def test_a_ranks_own_state(ranks: Ranks, stage: int, make: Any) -> None:
    ranks(2).run(_own, stage, make)


def _plain_runs(rank: int, world: int, stage: int, make: Any, before: bool) -> None:
    """The state of a plain run is cut to this rank's pieces."""
    twin = Twin(rank, world, stage)
    twin.optimizers.append(make(twin.plain.parameters()))
    for step in range(2):
        twin.plain_backward(step)
        twin.step()
        twin.plain.zero_grad()
    model = build()
    optimizer = make(model.parameters()) if before else None
    model.load_state_dict(twin.plain.state_dict())
    twin.model, twin.engine = model, rg.shard(model, stage)
    optimizer = optimizer or make(model.parameters())
    optimizer.load_state_dict(through_a_file(twin.optimizers[0].state_dict()))
    held = sum(value.local.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
    assert held < 0.6 * sum(param.numel() for param in twin.plain.parameters()) * (2 if make is adam else 1)
    twin.optimizers.append(optimizer)
    small_steps(twin, 2, 2)
    twin.check_weights()
    twin.close()


@pytest.mark.parametrize("before", (False, True), ids=("made after", "made before"))
@OPTIMIZERS
@EACH_STAGE
def test_the_state_of_a_plain_run(ranks: Ranks, stage: int, make: Any, before: bool) -> None:
    ranks(2).run(_plain_runs, stage, make, before)


def _stepped_before(rank: int, world: int, stage: int, make: Any) -> None:
    """An optimizer that has stepped before `shard()` goes on from there."""
    twin = Twin(rank, world, stage)
    twin.optimize(make)
    model = build()
    optimizer = make(model.parameters())
    twin.plain_backward(0)
    for param, wanted in zip(model.parameters(), twin.plain.parameters(), strict=True):
        param.grad = wanted.grad.clone()
    twin.optimizers[0].step()
    optimizer.step()
    twin.plain.zero_grad()
    optimizer.zero_grad()
    twin.model, twin.engine = model, rg.shard(model, stage)
    twin.optimizers[1] = optimizer
    small_steps(twin, 1, 2)
    twin.check_weights()
    for param, state in optimizer.state.items():
        assert all(value.shape == param.shape for value in state.values() if value.dim())
    twin.close()


@OPTIMIZERS
@EACH_STAGE
def test_an_optimizer_stepped_before_sharding(ranks: Ranks, stage: int, make: Any) -> None:
    ranks(2).run(_stepped_before, stage, make)


class Scalars(nn.Module):
    """Parameters of one element, whose state has the shape of a step counter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


def _scalars(rank: int, world: int) -> None:
    model, plain = Scalars(), Scalars()
    optimizer, wanted = adam(model.parameters()), adam(plain.parameters())
    for each, which in ((model, optimizer), (plain, wanted)):
        each(torch.ones(3)).sum().backward()
        which.step()
        which.zero_grad()
    rg.shard(model, 3)
    other = adam(model.parameters())
    other.load_state_dict(through_a_file(wanted.state_dict()))
    for number in range(2):
        for each, which in ((model, other if number else optimizer), (plain, wanted)):
            each(torch.ones(3)).sum().backward()
            which.step()
            which.zero_grad()
        if not number:
            other.load_state_dict(optimizer.state_dict())
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items()), state
    dist.barrier()


def test_parameters_of_one_element(ranks: Ranks) -> None:
    ranks(2).run(_scalars)


# ---- between worlds
def _states(rank: int, world: int, seed: int) -> State:
    model = build(seed)
    rg.shard(model, 3)
    optimizer = adam(model.parameters())
    loss_of(model, batch(0)).backward()
    optimizer.step()
    state = through_a_file(optimizer.state_dict())
    dist.barrier()
    return state


def _loaded(rank: int, world: int, state: State, sharded: bool = True) -> str:
    """What loading said, or which state is then not the one of training on this many ranks."""
    model = build()
    if sharded:
        rg.shard(model, 3)
    wanted, optimizer = adam(model.parameters()), adam(model.parameters())
    loss_of(model, batch(0)).backward()
    wanted.step()
    dist.barrier()
    try:
        optimizer.load_state_dict(state)
    except rg.StateError as error:
        assert not optimizer.state, "part of it was loaded"
        return str(error)
    wrong = [
        name
        for name, param in model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq", "step")
        if not _equal(optimizer.state[param][key], wanted.state[param][key])
    ]
    return f"wrong: {wrong}" if wrong else ""


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """On this rank: the ranks may not all be here."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.equal(one, other)


def test_one_ranks_state_on_all_ranks(ranks: Ranks) -> None:
    of_rank_0, _ = ranks(2).run(_states, 3)
    fits, said = ranks(2).run(_loaded, of_rank_0)
    assert fits == ""
    assert said.startswith("rank 1: optimizer.load_state_dict(): exp_avg of parameter ")
    assert "was saved by rank 0 of 2" in said and "this is rank 1 of 2" in said
    assert "each rank saves its own optimizer.state_dict() and loads that one" in said


def _one_for_all(rank: int, world: int) -> str:
    """The same with pieces of one size on both ranks: torch would see nothing wrong."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    rg.shard(model, 3)
    optimizer = adam(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    states = [optimizer.state_dict()]
    dist.broadcast_object_list(states, src=0)
    optimizer = adam(model.parameters())
    try:
        optimizer.load_state_dict(states[0])
    except rg.StateError as error:
        return str(error)
    return ""


def test_one_ranks_state_where_pieces_are_of_one_size(ranks: Ranks) -> None:
    fits, said = ranks(2).run(_one_for_all)
    assert fits == ""
    assert "exp_avg of parameter 0.weight (elements 0 to 2048 of 4096) was saved by rank 0 of 2" in said
    assert "this is rank 1 of 2 (elements 2048 to 4096)" in said


def test_the_state_of_another_world(ranks: Ranks) -> None:
    of_two = ranks(2).run(_states, 3)
    (of_one,) = ranks(1).run(_states, 3)
    assert ranks(2).run(_loaded, of_one) == ["", ""]  # it has everything: cut
    (said,) = ranks(1).run(_loaded, of_two[1])
    assert "was saved by rank 1 of 2" in said and "this is rank 0 of 1" in said
    said = ranks(2).run(_loaded, of_two[1])[0]
    assert "was saved by rank 1 of 2" in said


def test_pieces_into_plain_parameters(ranks: Ranks) -> None:
    of_two = ranks(2).run(_states, 3)
    (of_one,) = ranks(1).run(_states, 3)
    assert ranks(1).run(_loaded, of_one, False) == [""]
    (said,) = ranks(1).run(_loaded, of_two[0], False)
    assert "was saved by rank 0 of 2" in said and "the parameter here is not sharded" in said


# ---- what does not fit
def test_a_state_that_does_not_say_whose_it_is(ranks: Ranks) -> None:
    states = ranks(2).run(_states, 3)
    plain = {index: {key: value.clone() for key, value in each.items()} for index, each in states[0]["state"].items()}
    for rank, said in enumerate(ranks(2).run(_loaded, {**states[0], "state": plain})):
        assert said.startswith(f"rank {rank}: optimizer.load_state_dict(): exp_avg of parameter ")
        assert "not the parameter's shape" in said and "does not say whose piece it is" in said


def _misfits(rank: int, world: int) -> list[str]:
    other = nn.Sequential(nn.Linear(7, 5))
    optimizer = adam(other.parameters())
    other(torch.ones(1, 7)).sum().backward()
    optimizer.step()
    model = nn.Sequential(nn.Linear(6, 5))
    rg.shard(model, 3)
    ours = adam(model.parameters())
    said = []
    with pytest.raises(rg.StateError) as refused:
        ours.load_state_dict(optimizer.state_dict())
    said.append(str(refused.value))
    with pytest.raises(ValueError, match="different number of parameter groups"):  # torch's own
        ours.load_state_dict({"state": {}, "param_groups": []})
    return said


def test_the_state_of_another_model(ranks: Ranks) -> None:
    for said in ranks(2).run(_misfits):
        assert "exp_avg of parameter 0.weight has shape (5, 7)" in said[0] and "(5, 6)" in said[0]


def _hooks(rank: int, world: int) -> None:
    """Users' hooks see the pieces, and what they make of them is what is loaded."""
    twin = Twin(rank, world, 3)
    twin.optimize(adam)
    twin.train(0)
    optimizer = twin.optimizers[1]
    whole = through_a_file(twin.optimizers[0].state_dict())
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "state": whole["state"]})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "state": state["mine"]})
    state = optimizer.state_dict()
    assert state["state"] is whole["state"]
    optimizer.load_state_dict({**state, "state": {}, "mine": whole["state"]})
    twin.train(1)
    twin.check_weights()
    twin.close()


def test_users_hooks(ranks: Ranks) -> None:
    ranks(2).run(_hooks)


class _Own(torch.optim.Optimizer):
    """Makes its state when there is none, and keeps something of its own beside it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.state["calls"] = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.state["calls"] += 1
        for param in self.param_groups[0]["params"]:
            if param not in self.state:
                self.state[param] = {"average": torch.zeros_like(param)}
            self.state[param]["average"].add_(param.grad, alpha=0.5)
            param.sub_(self.state[param]["average"])


def _written_otherwise(rank: int, world: int) -> tuple[Any, ...]:
    twin = Twin(rank, world, 3)
    twin.optimize(_Own)
    for step in range(2):
        twin.train(step)
    twin.check_weights()
    saved = twin.optimizers[1].state_dict()["state"]
    sgd = torch.optim.SGD(twin.model.parameters(), lr=0.0)
    twin.backward(3)
    sgd.step()
    twin.close()
    return saved["calls"], sorted(saved[0]), sgd.state_dict()["state"]


def test_optimizers_that_ask_whether_there_is_a_state(ranks: Ranks) -> None:
    assert ranks(2).run(_written_otherwise) == [(2, ["average"], {})] * 2
