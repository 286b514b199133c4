"""`state_dict()` is a copy: writing to it is refused by name, and a tied weight is in it once, as in torch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import Ranks
from tests.multiproc.twin import Twin
from tests.small import batch, build, loss_of
from tests.stages import EACH_STAGE

Write = Callable[[nn.Module], Any]

WRITES: dict[str, Write] = {
    "a method": lambda model: model.state_dict()["head.weight"].mul_(2.0),
    "a row": lambda model: model.state_dict()["head.weight"].__setitem__(0, 1.0),
    "copy_": lambda model: model.state_dict()["head.weight"].copy_(torch.ones(17, 12)),
    "foreach": lambda model: torch._foreach_mul_(list(model.state_dict().values()), 0.5),
    "out=": lambda model: torch.mul(torch.ones(17, 12), 2.0, out=model.state_dict()["head.weight"]),
    "of a submodule": lambda model: model.head.state_dict()["weight"].zero_(),
}
USES: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda model: model(batch(0)),
    "state_dict": lambda model: model.state_dict(),
    "module.weight": lambda model: model.head.weight,
}


def _written(rank: int, world: int, stage: int, write: str, use: str) -> str:
    twin = Twin(rank, world, stage)
    twin.optimize()
    WRITES[write](twin.model)
    with pytest.raises(rg.UnsupportedError) as refused:
        USES[use](twin.model)
    for _ in range(40):  # every parameter that was written to says so, once
        try:
            twin.model(batch(0))
            break
        except rg.UnsupportedError:
            assert write == "foreach"
    twin.train(0)  # goes on
    twin.check_weights()
    twin.close()
    return str(refused.value)


@pytest.mark.parametrize("write", WRITES)
@EACH_STAGE
def test_writes_are_refused(ranks: Ranks, stage: int, write: str) -> None:
    for rank, said in enumerate(ranks(2).run(_written, stage, write, "forward")):
        assert said.startswith(f"rank {rank}: what state_dict() returned for parameter ")
        assert write == "foreach" or "parameter head.weight was written to" in said
        assert "copy.deepcopy(model.state_dict())" in said


@pytest.mark.parametrize("use", USES)
def test_whatever_uses_the_parameter_next_says_so(ranks: Ranks, use: str) -> None:
    assert all("head.weight was written to" in said for said in ranks(2).run(_written, 3, "a method", use))


def _stepped(rank: int, world: int) -> str:
    """A loop that never reads a weight but in its step."""
    twin = Twin(rank, world, 3)
    twin.optimize()
    twin.backward(0)
    twin.model.state_dict()["head.weight"].mul_(2.0)
    with pytest.raises(rg.UnsupportedError) as refused:
        twin.optimizers[1].step()
    dist.barrier()
    return str(refused.value)


def test_a_step_says_so(ranks: Ranks) -> None:
    assert all("head.weight was written to" in said for said in ranks(2).run(_stepped))


def _one_rank_writes(rank: int, world: int) -> bool:
    """The step is refused on that rank before the others have taken it: caught and called again, it is the first."""
    twin = Twin(rank, world, 3)
    twin.optimize()
    twin.backward(0)
    if rank == 0:
        twin.model.state_dict()["head.weight"].mul_(2.0)
        with pytest.raises(rg.UnsupportedError, match=r"head\.weight was written to"):
            twin.optimizers[1].step()
    twin.step()
    twin.check_weights()
    twin.close()
    return True


def test_a_refused_step_changes_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(_one_rank_writes) == [True, True]


def _fine(rank: int, world: int, stage: int) -> None:
    """What people rightly do with a state dict."""
    twin = Twin(rank, world, stage)
    twin.optimize()
    averages = [copy.deepcopy(model.state_dict()) for model in twin.both]
    for step in range(2):
        twin.train(step)
        for model, average in zip(twin.both, averages, strict=True):
            for name, value in model.state_dict().items():
                average[name].mul_(0.5).add_(value, alpha=0.5)
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])
    for model in twin.both:
        state = model.state_dict()
        for name, value in build(7).state_dict().items():
            state[name].copy_(value)  # as torch.distributed.checkpoint loads
        model.load_state_dict(state)
        with torch.no_grad():
            model.state_dict(keep_vars=True)["head.weight"].mul_(0.5)
    twin.check_weights()
    twin.train(2)
    twin.check_weights()
    other = build(9)
    other.load_state_dict(copy.deepcopy(twin.model.state_dict()), assign=True)
    loss_of(other, batch(0)).backward()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    twin.train(3)
    twin.check_weights()
    twin.close()


@EACH_STAGE
def test_what_is_not_lost_is_not_refused(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_fine, stage)


def _in_inference_mode(rank: int, world: int) -> None:
    model = build()
    rg.shard(model, 3)
    with torch.inference_mode():
        state = model.state_dict()
    assert not any(value.is_inference() for value in state.values())
    dist.barrier()


def test_in_inference_mode(ranks: Ranks) -> None:
    ranks(2).run(_in_inference_mode)


# ---- tied weights
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1][0].weight = self.blocks[0][0].weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _size(state: dict[str, Any]) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getbuffer().nbytes


def _tied(rank: int, world: int, stage: int) -> None:
    plain, model = Tied(), Tied()
    rg.shard(model, stage)
    kept = model.state_dict()  # one that is alive does not matter
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    state, wanted = model.state_dict(), plain.state_dict()
    for one, other in (("embed.weight", "head.weight"), ("blocks.0.0.weight", "blocks.1.0.weight")):
        assert wanted[one].data_ptr() == wanted[other].data_ptr()
        assert state[one].data_ptr() == state[other].data_ptr() and state[one] is not state[other]
        assert torch.equal(state[one], model.get_parameter(one).shown())
    assert state["embed.weight"].data_ptr() != kept["embed.weight"].data_ptr()
    assert _size(state) == _size(wanted)
    again = model.state_dict(destination=state)  # torch lets people go on with a dict
    assert again["embed.weight"].data_ptr() == again["head.weight"].data_ptr()
    outer = nn.ModuleDict({"model": model}).state_dict()
    assert outer["model.embed.weight"].data_ptr() == outer["model.head.weight"].data_ptr()
    dist.barrier()


@EACH_STAGE
def test_tied_weights_are_saved_once(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_tied, stage)
