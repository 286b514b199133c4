"""Communication is counted: by the ledger, and by what torch.distributed was really asked to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
from tests.harness import RankPool
from tests.small import BLOCKS, batch, build, loss_of

INNER = [f"blocks.{i}" for i in range(BLOCKS)]


def _train(rank: int, world: int, stage: int, backwards: int, options: dict[str, Any]) -> dict[str, Any]:
    """Two warm steps, then one that is counted."""
    model = build()
    if options.pop("freeze", False):
        model.blocks[1].requires_grad_(False)
    engine = rg.shard(model, stage, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        engine.ledger.clear()
        for part in range(backwards):
            loss_of(model, batch(rank, step + part)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ledger = engine.ledger
    names = [unit.name for unit in engine.units]
    counts = {kind: Counter({n: ledger.count(kind, n) for n in names}) for kind in ("gather", "reduce", "join")}
    return counts | {"order": [(e.kind.value, e.unit) for e in ledger if e.kind in ("gather", "reduce")]}


@pytest.mark.parametrize("world", (1, 2))
@pytest.mark.parametrize("backwards", (1, 3))
def test_stage_3(ranks: Callable[[int], RankPool], world: int, backwards: int) -> None:
    for seen in ranks(world).run(_train, 3, backwards, {}):
        expected = dict.fromkeys(INNER, 2 * backwards)
        # Turning around, the pages of the head (root) and of the last block are still there.
        expected[INNER[-1]] = backwards
        expected["(root)"] = 2 * backwards  # at both ends of the forward, not in the backward
        if world == 1:
            expected = dict.fromkeys([*INNER, "(root)"], 1)  # the page is the shard
        assert dict(seen["gather"]) == expected
        assert dict(seen["reduce"]) == dict.fromkeys([*INNER, "(root)"], backwards)
        assert not any(seen["join"].values())


@pytest.mark.parametrize("backwards", (1, 3))
def test_stage_2(ranks: Callable[[int], RankPool], backwards: int) -> None:
    for seen in ranks(2).run(_train, 2, backwards, {}):
        assert dict(seen["gather"]) == dict.fromkeys([*INNER, "(root)"], 1)
        assert dict(seen["reduce"]) == dict.fromkeys([*INNER, "(root)"], backwards)


@pytest.mark.parametrize("backwards", (1, 3))
def test_stage_1(ranks: Callable[[int], RankPool], backwards: int) -> None:
    for seen in ranks(2).run(_train, 1, backwards, {}):
        assert dict(seen["gather"]) == dict.fromkeys([*INNER, "(root)"], 1)
        assert dict(seen["reduce"]) == dict.fromkeys([*INNER, "(root)"], 1)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_frozen_units_are_not_reduced_and_at_stages_1_and_2_not_gathered_again(
    ranks: Callable[[int], RankPool], stage: int
) -> None:
    for seen in ranks(2).run(_train, stage, 1, {"freeze": True}):
        assert seen["reduce"]["blocks.1"] == 0
        assert seen["reduce"]["blocks.0"] == 1
        if stage < 3:
            assert seen["gather"]["blocks.1"] == 0


def test_a_unit_is_reduced_before_the_next_is_gathered(ranks: Callable[[int], RankPool]) -> None:
    """Without prefetch the order is plain: forward, then each unit's page, then its reduction."""
    forward = ["(root)", *INNER, "(root)"]
    for seen in ranks(2).run(_train, 3, 1, {"prefetch": False}):
        backward: list[tuple[str, str]] = []
        for name in reversed(INNER):
            backward += [("gather", name), ("reduce", name)]
        assert seen["order"] == [("gather", n) for n in forward] + backward + [("reduce", "(root)")]


def test_a_budget_keeps_pages(ranks: Callable[[int], RankPool]) -> None:
    for seen in ranks(2).run(_train, 3, 1, {"resident": "1GiB"}):
        assert dict(seen["gather"]) == dict.fromkeys([*INNER, "(root)"], 1)


def _observed(rank: int, world: int, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    model = build()
    engine = rg.shard(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent, received = Counter[str](), Counter[str]()
    real_send, real_receive = dist.isend, dist.irecv

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["bytes"] += tensor.nbytes
        return real_send(tensor, *args, **kwargs)

    def irecv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        received["bytes"] += tensor.nbytes
        return real_receive(tensor, *args, **kwargs)

    dist.barrier()
    dist.isend, dist.irecv = isend, irecv
    dist.barrier()  # the service thread of a rank answers as soon as another asks
    try:
        engine.ledger.clear()
        for step in range(2):
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
    finally:
        dist.isend, dist.irecv = real_send, real_receive
    ledger = engine.ledger
    return (
        {"sent": sent["bytes"], "received": received["bytes"]},
        {"gather": ledger.bytes("gather"), "reduce": ledger.bytes("reduce")},
    )


@pytest.mark.parametrize("world", (1, 2, 4))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_the_ledger_agrees_with_torch_distributed(ranks: Callable[[int], RankPool], stage: int, world: int) -> None:
    """Every rank sends its shard to every reader and its buckets' parts to every owner, and nothing else."""
    for observed, ledger in ranks(world).run(_observed, stage):
        assert observed["received"] == ledger["gather"] + ledger["reduce"]
        assert observed["sent"] == ledger["gather"] + ledger["reduce"]
        assert ledger["reduce"] > 0 or world == 1


def _wire(rank: int, world: int) -> list[tuple[int, int, int]]:
    model = build()
    engine = rg.shard(model, 3)
    loss_of(model, batch(rank)).backward()
    layouts = {unit.name: unit.layout for unit in engine.units}
    return [(e.bytes, layouts[e.unit].page_bytes, world) for e in engine.ledger if e.kind == "reduce"]


@pytest.mark.parametrize("world", (2, 4))
def test_a_reduction_sends_each_byte_once(ranks: Callable[[int], RankPool], world: int) -> None:
    for events in ranks(world).run(_wire):
        assert len(events) == BLOCKS + 1
        for nbytes, bucket, n in events:
            assert nbytes * n == bucket * (n - 1)
