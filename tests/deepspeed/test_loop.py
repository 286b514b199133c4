"""DeepSpeed's documented training loop, with the import changed."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import retrograde.deepspeed as deepspeed
from tests.deepspeed.pair import Pair, WithLoss, build_with_loss, config
from tests.harness import Ranks
from tests.multiproc.twin import sgd
from tests.small import batch
from tests.stages import EACH_STAGE

STEPS = 3


def _micro_batches(pair: Pair, step: int) -> list[int]:
    return [pair.divisor * step + part for part in range(pair.divisor)]


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}}


def _adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def _loop(rank: int, world: int, stage: int, accumulation: int, more: dict[str, Any]) -> dict[str, Any]:
    pair = Pair(rank, world, config(stage, accumulation, **more), optimize=_adamw if "optimizer" in more else sgd)
    engine = pair.engine
    norms = []
    for step in range(STEPS):
        for part in _micro_batches(pair, step):
            loss = engine(batch(rank, part))
            engine.backward(loss)
            engine.step()

        def program(model: nn.Module, rank: int, step: int = step) -> None:
            for part in _micro_batches(pair, step):
                (model(batch(rank, part)) / accumulation).backward()

        pair.plain_play(program)
        norms.append((engine.get_global_grad_norm(), float(pair.plain_step(engine.gradient_clipping()))))
    seen = {
        "wrong": pair.wrong_weights(),
        "norms": norms,
        "off": pair.furthest(),
        "steps": (engine.global_steps, engine.micro_steps, engine.global_samples),
    }
    pair.close()
    return seen


@EACH_STAGE
@pytest.mark.parametrize("more", ({}, ADAMW), ids=("SGD", "AdamW"))
def test_weights_are_plain_torchs(ranks: Ranks, stage: int, more: dict[str, Any]) -> None:
    for seen in ranks(2).run(_loop, stage, 4, more):
        assert seen["wrong"] == []
        assert seen["steps"] == (STEPS, 4 * STEPS, 2 * 2 * 4 * STEPS)


def _muon_loop(rank: int, world: int, stage: int) -> list[str]:
    """The matrices inside are Muon's; the rest is not trained."""

    def make() -> WithLoss:
        model = build_with_loss()
        for param in model.parameters():
            param.requires_grad_(param.ndim == 2)
        model.embed.requires_grad_(False)
        return model

    asked = {"type": "Muon", "params": {"lr": 1.0, "muon_lr": 2**-4, "momentum": 0.5, "weight_decay": 2**-3}}
    pair = Pair(rank, world, config(stage, 2, optimizer=asked), make, _muon)
    for step in range(STEPS):
        for part in _micro_batches(pair, step):
            pair.engine.backward(pair.engine(batch(rank, part)))
            pair.engine.step()

        def program(model: nn.Module, rank: int, step: int = step) -> None:
            for part in _micro_batches(pair, step):
                (model(batch(rank, part)) / 2).backward()

        pair.plain_play(program)
        pair.plain_step()
    wrong = pair.wrong_weights()
    pair.close()
    return wrong


def _muon(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=2**-4, momentum=0.5, weight_decay=2**-3)


@EACH_STAGE
def test_muon(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_muon_loop, stage) == [[], []]


@EACH_STAGE
def test_clipping(ranks: Ranks, stage: int) -> None:
    """Weights cannot be compared bit for bit where a norm that is added up in another order divides them."""
    for seen in ranks(2).run(_loop, stage, 4, {"gradient_clipping": 2**-6}):
        for ours, theirs in seen["norms"]:
            assert abs(ours - theirs) <= torch.finfo(torch.float32).eps * theirs  # 1 ulp
        assert seen["off"] <= 2 * STEPS * torch.finfo(torch.float32).eps


def _clipped_by_our_norm(rank: int, world: int, stage: int) -> list[str]:
    """With our norm in torch's formula the weights are bit for bit the same: nothing but the norm differs."""
    pair = Pair(rank, world, config(stage, gradient_clipping=2**-6))
    for step in range(STEPS):
        pair.engine.backward(pair.engine(batch(rank, step)))
        pair.engine.step()
        pair.plain_play(lambda model, rank, step=step: model(batch(rank, step)).backward())
        norm = torch.tensor(pair.engine.get_global_grad_norm())
        torch.nn.utils.clip_grads_with_norm_(pair.plain.parameters(), 2**-6, norm)
        pair.plain_step()
    wrong = pair.wrong_weights()
    pair.close()
    return wrong


@EACH_STAGE
def test_nothing_but_the_norm_differs_where_it_clips(ranks: Ranks, stage: int) -> None:
    assert ranks(2).run(_clipped_by_our_norm, stage) == [[], []]


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _listed(rank: int, world: int) -> list[str]:
    records = _Records()
    logger = logging.getLogger("retrograde.deepspeed")
    logger.addHandler(records)
    try:
        for idle in ({"overlap_comm": True, "contiguous_gradients": False}, {}):
            engine, *_ = deepspeed.initialize(model=build_with_loss(), config=config(2, zero_optimization=idle))
            engine.backward(engine(batch(rank)))
            engine.step()
    finally:
        logger.removeHandler(records)
    dist.barrier()
    return records.said


def test_keys_without_effect_are_listed_once(ranks: Ranks) -> None:
    (said,), nothing = ranks(2).run(_listed)
    assert nothing == [] and [line.partition(": ")[0] for line in said.splitlines()] == [
        "keys of the config that have no effect:",
        "  zero_optimization.overlap_comm",
        "  zero_optimization.contiguous_gradients",
    ]


def _refused(rank: int, world: int) -> list[str]:
    """Arguments of `initialize()`: before anything is sharded, and without harm to what is."""
    said = []
    for arguments in (
        {"config": config(2), "mpu": object()},
        {"config": config(2), "config_params": config(2)},
        {},
        {"config": config(2), "optimizer": 3},
        {"config": config(2), "engine": 1},
    ):
        with pytest.raises((deepspeed.ConfigError, deepspeed.NotYetError, TypeError)) as error:
            deepspeed.initialize(model=build_with_loss(), **arguments)
        said.append(str(error.value))
    engine, *_ = deepspeed.initialize(model=build_with_loss(), config=config(2))
    engine.backward(engine(batch(rank)))
    engine.step()
    dist.barrier()
    return said


def test_what_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(_refused):
        assert [text.partition(" ")[0] for text in said] == [
            "mpu:",
            "config:",
            "config:",
            "optimizer=3",
            "initialize()",
        ]


# ---- the whole script of the documentation: arguments, a JSON file, a data set, a schedule
class _Ids(Dataset[Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return batch(index)[0]


def _script(rank: int, world: int, path: str) -> dict[str, Any]:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", path])
    model = build_with_loss()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=_Ids()
    )
    sizes, rates = [], []
    for ids in loader:
        loss = engine(ids)
        engine.backward(loss)
        rates.append(engine.get_lr()[0])
        engine.step()
        sizes.append(len(ids))
    dist.barrier()
    return {
        "same": engine.optimizer is optimizer and engine.lr_scheduler is scheduler,
        "kind": type(optimizer).__name__,
        "sizes": sizes,
        "rates": [*rates, *engine.get_lr()],
        "batch": (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()),
        "finite": bool(torch.isfinite(loss)),
        "passed_through": engine.head.out_features == model.head.out_features,
    }


def test_a_whole_script(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    asked = config(2, 2) | {
        "optimizer": {"type": "Adam", "params": {"lr": 0.5, "betas": [0.8, 0.9]}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.25, "warmup_num_steps": 2, "warmup_type": "linear"},
        },
    }
    file.write_text(json.dumps(asked))
    for seen in ranks(2).run(_script, str(file)):
        assert seen["same"] and seen["kind"] == "AdamW" and seen["finite"] and seen["passed_through"]
        assert seen["sizes"] == [2] * 4 and seen["batch"] == (8, 2)
        assert seen["rates"] == [0.0] * 4 + [0.125]  # the first two updates have none
