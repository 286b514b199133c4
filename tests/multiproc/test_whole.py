"""Parameters that one rank holds whole, and optimizers that update them there: Muon, Shampoo, Adafactor."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import retrograde as rg
from retrograde.ledger import Activity
from retrograde.parameters import ShardedTensor
from tests.checkpoint.runs import State, differences, everything, merged, train
from tests.harness import Ranks
from tests.meshes import mesh_of
from tests.multiproc.matrices import MAKE, ShampooByOwners, matrices_of, sharded, with_adamw
from tests.reference import play
from tests.small import BLOCKS, Small, backwards, batch, build, loss_of
from tests.stages import EACH_STAGE, EACH_WORLD, OPPOSITE_STAGES, PAGE_STAGES

STEPS = 3


def oracle(kind: str, world: int, stage: int, replicas: int = 1, steps: int = STEPS) -> State:
    model = build()
    optimizers = with_adamw(MAKE[kind], model)
    for step in range(steps):
        play(model, world, backwards(step), stage, replicas)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return merged([everything(model, optimizers)])


def _trained(rank: int, world: int, kind: str, stage: int, replicas: int = 1, **options: Any) -> State:
    model = sharded(stage, mesh=mesh_of(replicas, world), **options)
    optimizers = with_adamw(MAKE[kind], model)
    train(model, optimizers, rank, *range(STEPS))
    return everything(model, optimizers)


# ---- the same numbers
@EACH_STAGE
@EACH_WORLD
def test_muon_is_exact(ranks: Ranks, world: int, stage: int) -> None:
    wanted = oracle("muon", world, stage)
    assert len(wanted["optimizers"][0]["state"]) == 2 * BLOCKS
    assert differences(wanted, merged(ranks(world).run(_trained, "muon", stage))) == []


@OPPOSITE_STAGES
@pytest.mark.parametrize("kind", [kind for kind in MAKE if kind != "muon"])
def test_others_are_exact(ranks: Ranks, kind: str, stage: int) -> None:
    wanted = oracle(kind, 2, stage)
    assert differences(wanted, merged(ranks(2).run(_trained, kind, stage))) == []


@OPPOSITE_STAGES
def test_in_replicas(ranks: Ranks, stage: int) -> None:
    wanted = oracle("muon", 4, stage, replicas=2)
    assert differences(wanted, merged(ranks(4).run(_trained, "muon", stage, replicas=2))) == []


@PAGE_STAGES
def test_by_collectives(ranks: Ranks, stage: int) -> None:
    """Whose shards are equally long."""
    wanted = oracle("muon", 2, stage)
    assert differences(wanted, merged(ranks(2).run(_trained, "muon", stage, transport="collective"))) == []


def test_in_the_backends_own_order(ranks: Ranks) -> None:
    """Of two ranks there is one order."""
    wanted = oracle("muon", 2, 3)
    assert differences(wanted, merged(ranks(2).run(_trained, "muon", 3, exact=False))) == []


# ---- who does what
def _counted(rank: int, world: int, stage: int) -> dict[str, Any]:
    model = build()
    engine = rg.shard(model, stage, whole=matrices_of(model))
    matrices = matrices_of(model)
    optimizer = torch.optim.Muon(matrices, lr=2**-4)
    names = {param: name for name, param in model.named_parameters()}
    orthogonalized: list[tuple[int, ...]] = []
    written = torch.optim._muon._zeropower_via_newtonschulz

    def counting(grad: Tensor, *args: Any) -> Tensor:
        orthogonalized.append(tuple(grad.shape))
        assert type(grad) is Tensor
        return written(grad, *args)

    found: dict[str, Any] = {"meetings": [], "others": []}
    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", counting):
        for step in range(3):
            loss_of(model, batch(rank, step)).backward()
            engine.coordinator.flush_pending_gradients("so that the step has nothing to reduce")
            engine.ledger.clear()
            optimizer.step()
            found["meetings"].append(engine.ledger.count(Activity.AGREE))
            found["others"] += [entry.kind for entry in engine.ledger.entries if entry.kind is Activity.GATHER]
            optimizer.zero_grad()
    found["orthogonalized"] = orthogonalized
    found["held"] = {names[param]: param.local.numel() for param in matrices}
    kept = {param: state["momentum_buffer"] for param, state in optimizer.state.items()}
    found["momentum"] = {names[param]: value.local.numel() for param, value in kept.items()}
    found["shapes"] = {value.shape == param.shape for param, value in kept.items()}
    dist.barrier()
    return found


@EACH_STAGE
def test_counts(ranks: Ranks, stage: int) -> None:
    """A step is one meeting. Nothing is gathered, momentum is the owner's alone, and each matrix is orthogonalized
    once."""
    by_rank = ranks(2).run(_counted, stage)
    sizes = {name: param.numel() for name, param in build().named_parameters()}
    for found in by_rank:
        assert found["meetings"] == [1, 1, 1]
        assert found["others"] == []
        assert found["shapes"] == {True}
        assert found["momentum"] == {name: held for name, held in found["held"].items() if held}
        assert sum(found["held"].values()) == BLOCKS * 36 * 12
    for name, held in by_rank[0]["held"].items():
        assert sorted([held, by_rank[1]["held"][name]]) == [0, sizes[name]]
    shapes = [shape for found in by_rank for shape in found["orthogonalized"]]
    assert sorted(shapes) == sorted(3 * BLOCKS * [(36, 12), (12, 36)])
    assert [len(found["orthogonalized"]) for found in by_rank] == [3 * BLOCKS] * 2


def _seen(rank: int, world: int) -> tuple[list[torch.Size], set[str]]:
    model = sharded(3)
    optimizer = ShampooByOwners(matrices_of(model))
    loss_of(model, batch(rank)).backward()
    optimizer.step()
    own = [param for param in matrices_of(model) if param.local.numel()]
    assert all(set(optimizer.state[param]) == {"step", "momentum", "left", "right"} for param in own)
    others = [param for param in matrices_of(model) if not param.local.numel()]
    assert not any(param in optimizer.state for param in others)
    assert all(isinstance(param.grad, ShardedTensor) for param in matrices_of(model))
    dist.barrier()
    return optimizer.updated, {type(param).__name__ for param in matrices_of(model)}


def test_a_declared_one_updates_what_it_owns(ranks: Ranks) -> None:
    (first, kinds), (second, _) = ranks(2).run(_seen)
    assert kinds == {"ShardedParameter"}
    assert sorted([*first, *second]) == sorted(BLOCKS * [torch.Size([36, 12]), torch.Size([12, 36])])
    assert len(first) == len(second) == BLOCKS


# ---- closures, errors, gradients and parameters that an optimizer replaces
@rg.per_parameter
class Replacing(Optimizer):
    """Gives parameters and gradients other memory, as some do."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad = param.grad / 2
                param.data = param.data - param.grad.T.contiguous().T
                if self.fails:
                    raise ValueError("in the middle of an update")


def _replaced(rank: int, world: int, stage: int) -> None:
    model = sharded(stage)
    matrices = matrices_of(model)
    optimizer = Replacing(matrices, {})

    def closure() -> Tensor:
        optimizer.zero_grad()
        assert all(isinstance(param, ShardedTensor) for param in matrices)
        loss = loss_of(model, batch(0))
        loss.backward()
        return loss

    closure()
    before = [param.full_tensor().clone() for param in matrices]
    grads = [param.grad.full_tensor() for param in matrices]
    optimizer.step(closure)
    for param, weight, grad in zip(matrices, before, grads, strict=True):
        assert torch.equal(param.full_tensor(), weight - grad / 2)
        assert torch.equal(param.grad.full_tensor(), grad / 2)
        assert torch.equal(dict(model.named_parameters())[param.slot.name].full_tensor(), weight - grad / 2)
    optimizer.fails = True
    with pytest.raises(ValueError, match="in the middle of an update"):
        optimizer.step()
    assert all(isinstance(param.grad, ShardedTensor) for param in matrices)
    optimizer.fails = False
    optimizer.zero_grad()
    closure()
    optimizer.step()
    dist.barrier()


@PAGE_STAGES
def test_what_an_update_replaces_arrives(ranks: Ranks, stage: int) -> None:
    ranks(2).run(_replaced, stage)


def _some_without_gradients(rank: int, world: int) -> None:
    model = sharded(3)
    matrices = matrices_of(model)
    optimizer = torch.optim.Muon(matrices, lr=2**-4)
    loss_of(model, batch(rank)).backward()
    before = [param.full_tensor().clone() for param in matrices]
    for param in matrices[::2]:
        param.grad = None
    optimizer.step()
    changed = [not torch.equal(param.full_tensor(), old) for param, old in zip(matrices, before, strict=True)]
    assert changed == [False, True] * BLOCKS
    own = [bool(param.local.numel()) for param in matrices]
    assert [param in optimizer.state for param in matrices[1::2]] == own[1::2]
    loss_of(model, batch(rank)).backward()
    optimizer.step()
    assert [param in optimizer.state for param in matrices] == own
    dist.barrier()


def test_parameters_without_gradients(ranks: Ranks) -> None:
    ranks(2).run(_some_without_gradients)


# ---- beside what is cut
def _mixed(rank: int, world: int, whole: bool) -> State:
    """All parameters in one optimizer, of which some are cut: through whole tensors, as ever."""
    model = build()
    rg.shard(model, 3, whole=matrices_of(model) if whole else None)
    optimizers: list[Optimizer] = [torch.optim.Adafactor(model.parameters(), lr=2**-4)]
    train(model, optimizers, rank, 0, 1)
    return everything(model, optimizers)


def test_beside_parameters_that_are_cut(ranks: Ranks) -> None:
    assert differences(*(merged(ranks(2).run(_mixed, whole)) for whole in (True, False))) == []


def _added_later(rank: int, world: int) -> str:
    model = sharded(3)
    optimizer = torch.optim.Muon(matrices_of(model)[1:], lr=2**-4)
    train(model, [optimizer], rank, 0)
    optimizer.add_param_group({"params": matrices_of(model)[:1]})
    train(model, [optimizer], rank, 1)
    optimizer.add_param_group({"params": [model.get_parameter("head.weight")]})
    with pytest.raises(rg.UnsupportedError) as refused:
        optimizer.step()
    dist.barrier()
    return str(refused.value)


def test_a_cut_one_that_comes_later_is_refused(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(_added_later)):
        assert said.startswith(f"rank {rank}: parameter head.weight is cut, and came to a Muon")
        assert "rg.shard(whole=...)" in said


# ---- models that change, are copied, are on the meta device
def _grown_and_copied(rank: int, world: int) -> None:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = Small()
    engine = rg.shard(model, 3, whole=model.blocks)
    assert [unit.name for unit in engine.units if unit.layout.shard_of] == [f"blocks.{i}[whole]" for i in range(BLOCKS)]
    plain = build()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
    model.blocks[0].extra = nn.Linear(12, 5)
    model.blocks[0].register_forward_hook(lambda module, args, out: out + module.extra(out).sum())
    loss_of(model, batch(rank)).backward()
    added = engine.units[-1]
    assert added.layout.shard_of is not None and added.name.endswith("added")
    twin = copy.deepcopy(model)
    layouts = [twin.get_parameter(name).unit.layout.shard_of for name, _ in model.named_parameters() if "up" in name]
    assert None not in layouts
    assert all(torch.equal(twin.state_dict()[name], value) for name, value in model.state_dict().items())
    dist.barrier()


def test_growth_copies_and_meta(ranks: Ranks) -> None:
    ranks(2).run(_grown_and_copied)


# ---- precision
def _in_bf16(rank: int, world: int, whole: bool) -> State:
    model = build()
    rg.shard(model, 3, whole=matrices_of(model) if whole else None, precision="bf16")
    optimizers = with_adamw(MAKE["muon"], model)
    train(model, optimizers, rank, 0, 1)
    assert {param.dtype for param in matrices_of(model)} == {torch.float32}
    return everything(model, optimizers)


def test_masters_are_updated_by_their_owners(ranks: Ranks) -> None:
    assert differences(*(merged(ranks(2).run(_in_bf16, whole)) for whole in (True, False))) == []


# ---- arguments
def _different(rank: int, world: int) -> str:
    model = build()
    with pytest.raises(rg.ShardingError) as refused:
        rg.shard(model, whole="matrices" if rank else None, timeout=20)
    return str(refused.value)


def test_ranks_say_the_same(ranks: Ranks) -> None:
    for said in ranks(2).run(_different):
        assert "the model on rank 1 differs from that on rank 0 in" in said and "[whole]" in said


def _unknown(rank: int, world: int) -> str:
    with pytest.raises(rg.ShardingError) as refused:
        rg.shard(build(), whole=["nothing"], timeout=20)
    return str(refused.value)


def test_names_are_checked(ranks: Ranks) -> None:
    for said in ranks(2).run(_unknown):
        assert "whole: the model has no parameter or module 'nothing'" in said


def test_only_classes_are_declared() -> None:
    with pytest.raises(rg.ShardingError, match=r"per_parameter.*is not a class of optimizers"):
        rg.per_parameter(torch.optim.SGD([torch.ones(1)]))  # type: ignore[type-var]
