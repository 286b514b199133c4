"""Masters beside pages: what `p`, `module.weight` and state dicts are, edits of each, bytes, casts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.harness import RankPool
from tests.live import live_bytes
from tests.multiproc.precise import FULL, PreciseTwin
from tests.small import batch, build, loss_of
from tests.stages import EACH_STAGE, PAGE_STAGES, WITH_OTHERS

Ranks = Callable[[int], RankPool]
NORMS = rg.Precision(param="bf16", keep=[nn.LayerNorm])


# ---- windows
def _in_windows(rank: int, world: int, stage: int, precision: Any) -> None:
    """Several backwards that are sent once, as one sum in `accumulate`; then one that takes along what was kept."""
    twin = PreciseTwin(rank, world, stage, precision)
    twin.optimize()

    def program(model: nn.Module, rank: int) -> None:
        for step in range(5):
            loss_of(model, batch(rank, step)).backward()

    with twin.engine.coalesce():
        program(twin.model, rank)
    twin.stage = 1  # one group for everything (tests/reference.py, Rule 4)
    twin.plain_play(program)
    twin.check_grads()
    twin.step()
    twin.zero_grad()
    with twin.engine.no_sync():
        program(twin.model, rank)
    loss_of(twin.model, batch(rank, 7)).backward()
    twin.plain_play(lambda model, rank: [program(model, rank), loss_of(model, batch(rank, 7)).backward()])
    twin.check()
    twin.close()


@EACH_STAGE
@pytest.mark.parametrize("precision", ("bf16", FULL), ids=("in bf16", "in fp32"))
def test_windows_add_up_in_the_dtype_asked_for(ranks: Ranks, stage: int, precision: Any) -> None:
    ranks(2).run(_in_windows, stage, precision)


# ---- edits
@torch.no_grad()
def _edited(rank: int, world: int, stage: int) -> None:
    """Edits of masters are made in fp32; edits of pages reach the masters of the elements that they changed."""
    twin = PreciseTwin(rank, world, stage)
    weight = "blocks.1.up.weight"
    block, plain, leaf = twin.model.blocks[1], twin.plain.get_parameter(weight), twin.model.get_parameter(weight)

    leaf.mul_(0.7)
    plain.mul_(0.7)
    twin.follow()
    twin.check_pages()

    low = twin.low.get_parameter(weight)
    before = low.clone()
    block.up.weight.clamp_(-0.05, 0.05)
    low.clamp_(-0.05, 0.05)
    plain.copy_(torch.where(low != before, low.float(), plain))
    assert 0 < (low != before).sum() < low.numel()
    twin.check_weights()
    twin.check_pages()

    leaf[3] = 0.3
    plain[3] = 0.3
    leaf.T.add_(1)  # a view is one of the page
    twin.follow()
    low.T.add_(1)
    plain.copy_(low.float())
    twin.check_weights()
    with twin.engine.full_params(block, write=True) as full:
        full[weight].neg_()
    plain.neg_()
    twin.follow()
    with torch.enable_grad():
        twin.backward(0)
    twin.check()
    twin.close()


@EACH_STAGE
@WITH_OTHERS
def test_edits(ranks: Ranks, stage: int, world: int) -> None:
    ranks(world).run(_edited, stage)


# ---- what is whole
def _whole(rank: int, world: int, stage: int) -> list[str]:
    twin = PreciseTwin(rank, world, stage)
    twin.optimize()
    twin.train(0)
    model, name = twin.model, "blocks.2.down.weight"
    leaf = model.get_parameter(name)
    exact = twin.plain.get_parameter(name).detach()
    seen = [str(dict(twin.engine.iter_full_params())[name].dtype), str(model.blocks[2].down.weight.dtype)]
    if rank == 0:  # at its own pace, as pages are read
        assert torch.equal(model.state_dict()[name], exact)
        assert torch.equal(leaf.full_tensor(), exact)
    assert torch.equal(rg.full_tensor(leaf), exact)
    with torch.no_grad():
        assert torch.equal(leaf @ exact.T, exact @ exact.T)
    (leaf.full_tensor() * 3).sum().backward()
    grad = twin.engine.full_grad(name)
    assert grad is not None and grad.dtype is torch.float32 and bool((grad == 3).all())
    model.zero_grad()

    grads = torch.autograd.grad(loss_of(model, batch(rank)), [leaf, model.blocks[2].up.weight])
    seen += [str(each.dtype) for each in grads]
    second = copy.deepcopy(model)
    assert torch.equal(second.get_parameter(name).full_tensor(), exact)
    assert second.blocks[2].down.weight.dtype is torch.bfloat16
    state = {key: value + 1 for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert torch.equal(leaf.full_tensor(), exact + 1)
    twin.close()
    return seen


@EACH_STAGE
@WITH_OTHERS
def test_what_is_whole(ranks: Ranks, stage: int, world: int) -> None:
    low, wide = "torch.bfloat16", "torch.float32"
    assert ranks(world).run(_whole, stage) == [[low, low, wide, low]] * world


# ---- files
def _continued(rank: int, world: int, stage: int, path: str) -> None:
    """Masters and optimizer state go on where they were; what is exported are masters."""
    twin = PreciseTwin(rank, world, stage)
    twin.optimize(torch.optim.AdamW)
    twin.train(0)
    rg.save(Path(path) / f"{stage}", twin.model, twin.optimizers[1])
    rg.export(Path(path) / f"out{stage}", twin.model)

    other = PreciseTwin(rank, world, 4 - stage, make=lambda: build(seed=11))
    other.optimize(torch.optim.AdamW)
    rg.load(Path(path) / f"{stage}", other.model, other.optimizers[1])
    other.plain.load_state_dict(twin.plain.state_dict())
    other.optimizers[0].load_state_dict(twin.optimizers[0].state_dict())
    other.follow()
    other.check_weights()
    other.train(1)
    other.check()
    fresh = build(seed=12)
    rg.shard(fresh, stage, precision="bf16")
    rg.load_pretrained(fresh, Path(path) / f"out{stage}")
    wanted = twin.plain.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in fresh.state_dict().items())
    other.close()


@EACH_STAGE
def test_checkpoints_have_masters(ranks: Ranks, stage: int, tmp_path: Path) -> None:
    ranks(2).run(_continued, stage, str(tmp_path))


# ---- bytes
def _bytes(rank: int, world: int, stage: int, precision: Any) -> dict[str, Any]:
    model = build()
    engine = rg.shard(model, stage, precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        engine.ledger.clear()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    shards = [unit.layout.shard_numel for unit in engine.units]
    dist.barrier()
    return {
        "gathered": engine.ledger.bytes("gather"),
        "reduced": engine.ledger.bytes("reduce"),
        "peak": engine.ledger.peak,
        "masters": [unit.shard.nbytes for unit in engine.units] == [4 * numel for numel in shards],
        "sources": [unit.source.nbytes for unit in engine.units] == [2 * numel for numel in shards],
    }


@PAGE_STAGES
def test_weights_travel_and_lie_in_half_the_bytes(ranks: Ranks, stage: int) -> None:
    """Of a model whose parameters are all multiples of the alignment in neither dtype, so within that."""
    wide, narrow = (ranks(2).run(_bytes, stage, precision)[0] for precision in (None, "bf16"))
    assert narrow["masters"] and narrow["sources"]
    for what in ("gathered", "reduced", "peak"):
        assert wide[what] * 0.5 <= narrow[what] <= wide[what] * 0.6, what


def _told_whole(rank: int, world: int, stage: int) -> tuple[int, int]:
    model = build()
    rg.shard(model, stage, precision="bf16")
    dist.barrier()
    before = live_bytes()
    state = model.state_dict()
    dist.barrier()
    return live_bytes() - before, sum(value.nbytes for value in state.values())


@PAGE_STAGES
def test_a_state_dict_leaves_nothing_but_itself(ranks: Ranks, stage: int) -> None:
    """Masters are read a unit at a time; of the last unit, too, only what the dictionary has is kept."""
    for grown, told in ranks(2).run(_told_whole, stage):
        assert grown == told


# ---- casts
class Looks(nn.Module):
    """Notes the dtypes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.first = nn.Linear(6, 6)
        self.register_buffer("offset", torch.full((6,), 2.0**-20))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        normed = self.norm(x)
        self.seen = [x.dtype, more["mask"].dtype, normed.dtype, self.norm.weight.dtype, self.offset.dtype]
        return self.first(normed), more["mask"]


def _cast(rank: int, world: int, precision: Any) -> list[str]:
    torch.manual_seed(0)
    model = Looks()
    rg.shard(model, precision=precision)
    x = torch.randn(3, 6, requires_grad=True)
    out, mask = model(x, more={"mask": torch.ones(3, dtype=torch.int64)})
    out.float().sum().backward()
    assert mask.dtype is torch.int64 and x.grad is not None and x.grad.dtype is torch.float32
    dist.barrier()
    return [str(dtype).removeprefix("torch.") for dtype in (*model.seen, out.dtype)]


@pytest.mark.parametrize(
    ("precision", "seen"),
    (
        ("bf16", ["bfloat16", "int64", "bfloat16", "bfloat16", "float32", "bfloat16"]),
        (NORMS, ["bfloat16", "int64", "bfloat16", "float32", "float32", "bfloat16"]),
        (
            rg.Precision(param="bf16", keep=nn.LayerNorm, inputs=False, output="fp32"),
            ["float32", "int64", "bfloat16", "float32", "float32", "float32"],
        ),
        (rg.Precision(reduce="bf16"), ["float32", "int64", "float32", "float32", "float32", "float32"]),
    ),
)
def test_arguments_and_results(ranks: Ranks, precision: Any, seen: list[str]) -> None:
    assert ranks(2).run(_cast, precision) == [seen] * 2


# ---- models on the meta device
def _made_from_meta(rank: int, world: int, stage: int) -> None:
    with torch.device("meta"):
        model = build()
    torch.manual_seed(3)
    rg.shard(model, stage, precision="bf16")
    wanted = build().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert model.head.weight.dtype is torch.bfloat16
    dist.barrier()


@PAGE_STAGES
def test_meta(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_made_from_meta, stage)


def _half_already(rank: int, world: int) -> list[str]:
    """A model that is in bf16, with masters; its copy is sharded in the same way."""
    model = build().bfloat16()
    rg.shard(model, precision=rg.Precision(master="fp32"))
    second = copy.deepcopy(model)
    found = [str(each.dtype) for each in (model.head.weight, model.get_parameter("head.weight"), second.head.weight)]
    assert torch.equal(second.head.weight, model.head.weight)
    dist.barrier()
    return found


def test_a_model_that_is_narrow_already(ranks: Ranks) -> None:
    assert ranks(2).run(_half_already) == [["torch.bfloat16", "torch.float32", "torch.bfloat16"]] * 2
