"""Reads a config of DeepSpeed, once, into plain values."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import retrograde as rg
from retrograde.integrations.deepspeed.loss_scale import LossScale
from retrograde.integrations.deepspeed.refusals import ConfigError, not_yet, wrong
from retrograde.integrations.deepspeed.words import Word, checked, without_effect

Given = Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class BatchSizes:
    """train = micro × accumulation × ranks."""

    train: int
    micro: int
    accumulation: int

    @staticmethod
    def of(train: int | None, micro: int | None, accumulation: int | None, world: int) -> "BatchSizes":
        """Make batch sizes, computing those that are None from the others."""
        if train is None and micro is None:
            raise ConfigError(
                "train_batch_size: neither it nor train_micro_batch_size_per_gpu is there; give one of them"
            )
        if micro is None:
            assert train is not None
            micro = train // world // (accumulation or 1)
        if accumulation is None:
            accumulation = 1 if train is None else train // micro // world if micro else 0
        if train is None:
            train = micro * accumulation * world
        sizes = BatchSizes(train, micro, accumulation)
        if min(train, micro, accumulation) < 1 or train != micro * accumulation * world:
            raise ConfigError(
                f"train_batch_size={train} is not train_micro_batch_size_per_gpu={micro} × "
                f"gradient_accumulation_steps={accumulation} × {world} ranks, all 1 or more; leave one of them out"
            )
        return sizes

    def with_train(self, train: int, world: int) -> "BatchSizes":
        """The sizes for another train batch size, by another number of accumulation steps."""
        if train % (self.micro * world):
            raise wrong("train_batch_size", train, "cannot be split", f"a multiple of {self.micro * world}")
        return BatchSizes.of(train, self.micro, None, world)

    def with_micro(self, micro: int, world: int) -> "BatchSizes":
        return BatchSizes.of(None, micro, self.accumulation, world)


@dataclass(frozen=True)
class ResidentLimits:
    """DeepSpeed's thresholds, in elements; None where the config says nothing."""

    live: int | None
    reuse: int | None
    parameter: int | None
    model: int | None

    def budget(self, model: nn.Module) -> int:
        """Bytes of pages that may stay at stage 3: elements that may be live, and parameters that are small enough.

        A page stays or goes as a whole, so that small parameters stay where units are made of them."""
        parameters = list(model.parameters())
        size = max((p.element_size() for p in parameters), default=0)
        reused = min((limit for limit in (self.live, self.reuse) if limit is not None), default=0) * size
        small = sum(_in_a_page(p.nbytes) for p in parameters if p.numel() <= (self.parameter or 0))
        return reused + (small if self.model is None else min(small, self.model * size))


def _in_a_page(nbytes: int) -> int:
    """The bytes that a parameter takes in a page: a multiple of 64, as in torch's allocator."""
    return -(-nbytes // 64) * 64


@dataclass(frozen=True)
class Section:
    """`{"type": ..., "params": {...}}`: an optimizer or a scheduler."""

    where: str
    type: str
    params: dict[str, Any]

    @staticmethod
    def of(where: str, given: Any) -> "Section | None":
        if given is None:
            return None
        kind, params = given.get("type"), given.get("params") or {}
        if not isinstance(kind, str):
            raise wrong(f"{where}.type", kind, "is not a name", "the name of one")
        if not isinstance(params, Mapping):
            raise wrong(f"{where}.params", params, "has another type", "a section (a dictionary)")
        return Section(where, kind, dict(params))


@dataclass(frozen=True)
class Config:
    """A config that was read. `asked`: its flat form, by the keys of the table in words.py."""

    asked: dict[str, Any]
    batch: BatchSizes
    idle: tuple[Word, ...]

    @staticmethod
    def of(given: Given, world: int) -> "Config":
        flat = checked(_loaded(given))
        sizes = [flat.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")]
        train, micro, accumulation = (
            None if size is None else int(size) for size in (*sizes, flat.get("gradient_accumulation_steps"))
        )
        config = Config(flat, BatchSizes.of(train, micro, accumulation, world), tuple(without_effect(flat)))
        config.check()
        return config

    def check(self) -> None:
        """Read every value that can be wrong, so that errors are raised now."""
        _ = self.stage, self.reduce, self.precision, self.offload, self.loss_scale, self.optimizer, self.scheduler

    def with_batch(self, batch: BatchSizes) -> "Config":
        return replace(self, batch=batch)

    @property
    def stage(self) -> int:
        """DeepSpeed's ZeRO stage. (With 0 DeepSpeed shards nothing; here it is as stage 1.)"""
        stage = int(self.asked.get("zero_optimization.stage") or 0)
        if stage > 3:
            raise wrong("zero_optimization.stage", stage, "is out of range", "0, 1, 2 or 3")
        return stage

    @property
    def clipping(self) -> float:
        """The norm to which gradients are clipped; 0 clips nothing."""
        return float(self.asked.get("gradient_clipping") or 0)

    @property
    def managed(self) -> bool:
        """Does the number of `step()` calls decide where the accumulation boundary is?"""
        return self.asked.get("managed_gradient_accumulation") is not False

    @property
    def reduce(self) -> str:
        reduce = str(self.asked.get("gradient_allreduce_op") or "mean").lower()
        if reduce not in ("mean", "sum"):
            raise wrong("gradient_allreduce_op", reduce, "is not known", '"mean" or "sum"')
        return reduce

    @property
    def precision(self) -> rg.Precision:
        wire = self._dtype("communication_data_type")
        accumulate = self._dtype("data_types.grad_accum_dtype")
        wanted = [kind for kind in ("bf16", "fp16") if self.asked.get(f"{kind}.enabled")]
        if len(wanted) > 1:
            raise ConfigError("fp16.enabled: bf16.enabled is there too; leave one of them out")
        return rg.Precision(param=wanted[0] if wanted else None, reduce=wire, accumulate=accumulate)

    @property
    def offload(self) -> rg.Offload:
        """What is offloaded. To offload parameters includes what the optimizer needs."""
        if self._on_host("offload_param", "cpu_offload_param"):
            return rg.Offload.PARAMETERS
        return rg.Offload.OPTIMIZER if self._on_host("offload_optimizer", "cpu_offload") else rg.Offload.NOTHING

    def _on_host(self, section: str, older: str) -> bool:
        key = f"zero_optimization.{section}.device"
        device = self.asked.get(key)
        if device == "nvme":
            raise not_yet(key, "offload to disks", '"cpu" or "none" are there')
        if device not in (None, "none", "cpu"):
            raise wrong(key, device, "is not known", '"cpu" or "none"')
        return device == "cpu" or bool(self.asked.get(f"zero_optimization.{older}"))

    def _dtype(self, key: str) -> str | None:
        said = self.asked.get(key)
        if said is not None and said.lower() not in ("fp32", "fp16", "bf16"):
            raise wrong(key, said, "is not known", '"fp32", "fp16" or "bf16"')
        return None if said is None else said.lower()

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale of fp16; None for other dtypes, which need none."""
        if not self.asked.get("fp16.enabled"):
            return None
        power, window = self.asked.get("fp16.initial_scale_power"), self.asked.get("fp16.loss_scale_window")
        return LossScale(
            fixed=float(self.asked.get("fp16.loss_scale") or 0),
            first=2.0 ** (16 if power is None else int(power)),
            window=1000 if window is None else int(window),
            least=float(self.asked.get("fp16.min_loss_scale") or 1),
        )

    @property
    def residency(self) -> ResidentLimits:
        names = ("max_live_parameters", "max_reuse_distance", "param_persistence_threshold")
        keys = [f"zero_optimization.stage3_{name}" for name in (*names, "model_persistence_threshold")]
        found = [self.asked.get(key) for key in keys]
        return ResidentLimits(*(None if limit is None else int(limit) for limit in found))

    @property
    def prefetch(self) -> bool:
        return self.asked.get("zero_optimization.stage3_prefetch_bucket_size") != 0

    @property
    def optimizer(self) -> Section | None:
        return Section.of("optimizer", self.asked.get("optimizer"))

    @property
    def scheduler(self) -> Section | None:
        return Section.of("scheduler", self.asked.get("scheduler"))

    @property
    def compiles_by_units(self) -> bool:
        return bool(self.asked.get("compile.deepcompile"))

    @property
    def drop_last(self) -> bool:
        return bool(self.asked.get("dataloader_drop_last"))

    def shard(self, model: nn.Module, process_group: torch.distributed.ProcessGroup | None = None) -> rg.Engine:
        return rg.shard(
            model,
            max(self.stage, 1),
            process_group=process_group,
            precision=self.precision,
            reduce=self.reduce,
            resident=self.residency.budget(model) if self.stage == 3 else 0,
            prefetch=self.prefetch,
            offload=self.offload,
        )


def _loaded(given: Given) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    if not isinstance(given, str | Path):
        raise wrong("config", given, "is not a config", "a dictionary or the name of a JSON file")
    path = Path(given)
    if not path.is_file():
        raise ConfigError(f"config={str(given)!r} is not a file; give a dictionary or the name of a JSON file")
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ConfigError(f"config={str(given)!r} is not JSON: {error}") from error
    if not isinstance(loaded, Mapping):
        raise wrong("config", loaded, "is not a section", "a JSON file with an object in it")
    return loaded


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary. Refuse a key that is there twice, which JSON allows."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{twice}: is there twice in one section; leave one of them out")
    return found
