"""Every public argument, given wrong: the error has its name, what was given and what to give, and nothing is lost."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import retrograde as rg
from tests.harness import Ranks
from tests.pipeline.cases import WIDTH, linears
from tests.small import Block, Small, batch, build, loss_of


@dataclass(frozen=True)
class Scene:
    """What the wrong calls are made on."""

    plain: Small
    model: Small
    engine: rg.Engine
    pipe: rg.Pipeline


Call = Callable[[Scene, Any], Any]


class Wrong(NamedTuple):
    call: Call
    value: Any
    words: tuple[str, ...]
    kind: type[Exception] = rg.ShardingError


ASKED: dict[str, set[str]] = {}  # by function or class, the arguments that the table has


def asked(of: str, name: str) -> None:
    ASKED.setdefault(of, set()).add(name)


def shard(name: str) -> Call:
    asked("shard", name)

    def call(scene: Scene, value: Any) -> None:
        arguments = {name: value} if name == "model" else {"model": scene.plain, name: value}
        rg.shard(**arguments)

    return call


def pipeline(name: str) -> Call:
    asked("Pipeline", name)

    def call(scene: Scene, value: Any) -> None:
        arguments = {"model": linears(4), "schedule": "1f1b", "microbatches": 2, "loss": F.mse_loss} | {name: value}
        rg.Pipeline(**arguments)

    return call


def compile_(name: str) -> Call:
    asked("compile", name)

    def call(scene: Scene, value: Any) -> None:
        arguments = {name: value} if name == "model" else {"model": scene.model, name: value}
        rg.compile(**arguments)

    return call


def zero(name: str) -> Call:
    asked("Zero", name)
    return lambda scene, value: rg.Zero(**{name: value})


def cut(name: str) -> Call:
    asked("Cut", name)
    return lambda scene, value: rg.Cut(**{name: value})


def step(name: str) -> Call:
    """Rank 0 has the first stage, which the inputs are for."""

    def call(scene: Scene, value: Any) -> None:
        x = torch.zeros(4, WIDTH)
        if name == "args":
            scene.pipe.step(value, target=x)
        else:
            scene.pipe.step(x, **({"target": x} | {name: value}))

    return call


def coalesce(scene: Scene, value: Any) -> None:
    with scene.engine.coalesce(value):
        pass


def full_params(scene: Scene, value: Any) -> None:
    with scene.engine.full_params(value):
        pass


def full_params_write(scene: Scene, value: Any) -> None:
    with scene.engine.full_params(write=value):
        pass


def full_params_leaves(scene: Scene, value: Any) -> None:
    with scene.engine.full_params(leaves=value):
        pass


def full_params_writer(scene: Scene, value: Any) -> None:
    with scene.engine.full_params(writer=value):
        pass


def gradient_divisor(scene: Scene, value: Any) -> None:
    scene.engine.gradient_divisor = value


SIZE = 'give bytes or a text like "2GiB"'
SECONDS = "give seconds, a number above 0"
FLAG = "give True or False"
RANK = "give a rank of this engine's process group, or None"
MODULES = "give modules of this model"
STAGES = "give 1, 2 or 3"
NAME = "give a parameter of this model or its name"
P = rg.PipelineError

WRONG: tuple[Wrong, ...] = (
    # ---- shard
    Wrong(shard("model"), None, ("model=None", "give an nn.Module")),
    Wrong(shard("model"), Small, ("model=<class", "is not a module", "give an nn.Module")),
    Wrong(shard("model"), [nn.Linear(2, 2)], ("model=[Linear", "give an nn.Module")),
    Wrong(shard("stage"), 0, ("stage=0", STAGES)),
    Wrong(shard("stage"), True, ("stage=True", STAGES)),
    Wrong(shard("stage"), 3.0, ("stage=3.0", STAGES)),
    Wrong(shard("stage"), "3", ("stage='3'", STAGES)),
    Wrong(shard("stage"), torch.tensor([1, 2]), ("stage=tensor([1, 2])", STAGES)),
    Wrong(shard("stage"), torch.tensor(True), ("stage=tensor(True)", STAGES)),
    Wrong(shard("units"), 5, ("units=5", 'give "auto", module classes or a predicate')),
    Wrong(shard("units"), None, ("units=None", 'give "auto", module classes or a predicate')),
    Wrong(shard("units"), (Block, 5), ("units: 5 is not a module class", "give classes of modules")),
    Wrong(shard("join"), "few", ("join='few'", SIZE)),
    Wrong(shard("join"), True, ("join=True", SIZE)),
    Wrong(shard("join"), None, ("join=None", SIZE)),
    Wrong(shard("process_group"), 5, ("process_group=5", "give a group of torch.distributed")),
    Wrong(shard("process_group"), "gloo", ("process_group='gloo'", "give a group of torch.distributed")),
    Wrong(shard("mesh"), 5, ("mesh=5", "give a DeviceMesh of one dimension")),
    Wrong(shard("mesh"), (2,), ("mesh=(2,)", "give a DeviceMesh of one dimension")),
    Wrong(shard("precision"), "int8", ("precision='int8'", 'give rg.Precision(...), one of "fp32"')),
    Wrong(shard("precision"), torch.int8, ("precision.param=torch.int8", "give fp32, bf16, fp16")),
    Wrong(shard("reduce"), "max", ("reduce='max'", 'give "mean" or "sum"')),
    Wrong(shard("reduce"), None, ("reduce=None", 'give "mean" or "sum"')),
    Wrong(shard("reduce"), np.zeros(2), ("reduce=array", 'give "mean" or "sum"')),
    Wrong(shard("exact"), "x", ("exact='x'", FLAG)),
    Wrong(shard("exact"), 1, ("exact=1", FLAG)),
    Wrong(shard("transport"), "pigeon", ("transport='pigeon'", '"collective"')),
    Wrong(shard("transport"), None, ("transport=None", '"one-sided"')),
    Wrong(shard("resident"), -1, ("resident=-1", "give 0 or more bytes")),
    Wrong(shard("resident"), math.nan, ("resident=nan", SIZE)),
    Wrong(shard("resident"), [1], ("resident=[1]", SIZE)),
    Wrong(shard("offload"), "disk", ("offload='disk'", '"optimizer", "parameters" or None')),
    Wrong(shard("offload"), True, ("offload=True", '"optimizer", "parameters" or None')),
    Wrong(shard("whole"), "rows", ("whole='rows'", '"matrices"')),
    Wrong(shard("whole"), ["nowhere"], ("whole: the model has no parameter or module 'nowhere'", '"matrices"')),
    Wrong(shard("init"), "zeros", ("init='zeros'", "give a function of a module, or None")),
    Wrong(shard("prefetch"), "no", ("prefetch='no'", FLAG)),
    Wrong(shard("prefetch"), 1, ("prefetch=1", FLAG)),
    Wrong(shard("overlap"), "no", ("overlap='no'", FLAG)),
    Wrong(shard("overlap"), None, ("overlap=None", FLAG)),
    Wrong(shard("timeout"), "60", ("timeout='60'", SECONDS)),
    Wrong(shard("timeout"), None, ("timeout=None", SECONDS)),
    Wrong(shard("timeout"), math.nan, ("timeout=nan", SECONDS)),
    Wrong(shard("timeout"), math.inf, ("timeout=inf", SECONDS)),
    Wrong(shard("timeout"), -1, ("timeout=-1", SECONDS)),
    Wrong(shard("timeout"), 0, ("timeout=0", SECONDS)),
    Wrong(shard("timeout"), True, ("timeout=True", SECONDS)),
    # ---- Precision
    Wrong(lambda scene, value: rg.Precision(reduce=value), 5, ("precision.reduce=5", "give fp32, bf16, fp16")),
    Wrong(
        lambda scene, value: rg.Precision(reduce=value), "int8", ("precision.reduce='int8'", "give fp32, bf16, fp16")
    ),
    Wrong(
        lambda scene, value: rg.Precision(reduce=value), torch.int8, ("precision.reduce=torch.int8", "give fp32, bf16")
    ),
    Wrong(lambda scene, value: rg.Precision(reduce=value), [], ("precision.reduce=[]", "give fp32, bf16, fp16")),
    # ---- Engine
    Wrong(coalesce, "much", ("coalesce(budget)='much'", SIZE)),
    Wrong(coalesce, -5, ("coalesce(budget)=-5", "give 0 or more bytes")),
    Wrong(coalesce, True, ("coalesce(budget)=True", SIZE)),
    Wrong(full_params, "blocks.0", ("full_params(modules)='blocks.0'", MODULES)),
    Wrong(full_params, None, ("full_params(modules)=None", MODULES)),
    Wrong(full_params, nn.Linear(2, 3), ("full_params(modules)=Linear", "is not part of this model", MODULES)),
    Wrong(full_params_write, 1, ("full_params(write)=1", FLAG)),
    Wrong(full_params_write, "yes", ("full_params(write)='yes'", FLAG)),
    Wrong(full_params_leaves, 1, ("full_params(leaves)=1", FLAG)),
    Wrong(full_params_writer, True, ("full_params(writer)=True", RANK)),
    Wrong(full_params_writer, -1, ("full_params(writer)=-1", RANK)),
    Wrong(full_params_writer, 99, ("full_params(writer)=99", "ranks", RANK)),
    Wrong(gradient_divisor, 0, ("gradient_divisor=0", "give a number above 0")),
    Wrong(gradient_divisor, -2, ("gradient_divisor=-2", "give a number above 0")),
    Wrong(gradient_divisor, math.inf, ("gradient_divisor=inf", "give a number above 0")),
    Wrong(gradient_divisor, math.nan, ("gradient_divisor=nan", "give a number above 0")),
    Wrong(gradient_divisor, "2", ("gradient_divisor='2'", "give a number above 0")),
    Wrong(lambda s, value: s.engine.iter_full_params(value), "lots", ("iter_full_params(budget)='lots'", SIZE)),
    Wrong(lambda s, value: s.engine.iter_full_params(value), None, ("iter_full_params(budget)=None", SIZE)),
    Wrong(lambda s, value: s.engine.full_grad(value), "no.such", ("full_grad(which)='no.such'", NAME)),
    Wrong(lambda s, value: s.engine.full_grad(value), 5, ("full_grad(which)=5", NAME)),
    Wrong(lambda s, value: s.engine.full_grad(value), nn.Parameter(torch.ones(2)), ("full_grad(which)=Param", NAME)),
    Wrong(lambda s, value: s.engine.clip_grad_norm_(value), "1", ("max_norm='1'", "give a number, 0 or more")),
    Wrong(lambda s, value: s.engine.clip_grad_norm_(value), None, ("max_norm=None", "give a number, 0 or more")),
    Wrong(lambda s, value: s.engine.clip_grad_norm_(value), -1.0, ("max_norm=-1.0", "give a number, 0 or more")),
    Wrong(lambda s, value: s.engine.clip_grad_norm_(value), math.nan, ("max_norm=nan", "give a number, 0 or more")),
    Wrong(lambda s, value: s.engine.clip_grad_norm_(1.0, value), "two", ("norm_type='two'", 'give a number or "inf"')),
    Wrong(lambda s, value: s.engine.clip_grad_norm_(1.0, value), None, ("norm_type=None", 'give a number or "inf"')),
    Wrong(lambda s, value: s.engine.clip_grad_norm_(1.0, value), math.nan, ("norm_type=nan", "give a number")),
    # ---- compile
    Wrong(compile_("model"), None, ("model=None", "give an nn.Module")),
    Wrong(compile_("backend"), "none such", ("backend='none such'", "give a callable or one of", "inductor")),
    Wrong(compile_("backend"), 5, ("backend=5", "give a callable or one of", "inductor")),
    Wrong(compile_("mode"), "fastest", ("mode='fastest'", "give None or one of", "max-autotune")),
    Wrong(compile_("mode"), 5, ("mode=5", "give None or one of", "max-autotune")),
    Wrong(compile_("options"), "fast", ("options='fast'", "give a dictionary or None")),
    Wrong(compile_("options"), {"no_such": 1}, ("options={'no_such': 1}", "no_such", "torch._inductor.list_options()")),
    Wrong(compile_("dynamic"), "no", ("dynamic='no'", "give True, False or None")),
    Wrong(compile_("fullgraph"), None, ("fullgraph=None", FLAG)),
    # ---- Ledger
    Wrong(lambda s, value: s.engine.ledger.count(value), "gathr", ("kind='gathr'", "give gather, drop, reduce")),
    Wrong(lambda s, value: s.engine.ledger.bytes(value), None, ("kind=None", "give gather, drop, reduce")),
    Wrong(lambda s, value: s.engine.ledger.count("gather", value), 3, ("unit=3", "give a unit's name or None")),
    Wrong(lambda s, value: s.engine.ledger.bytes("gather", value), Block, ("unit=<class", "give a unit's name")),
    # ---- Zero
    Wrong(zero("stage"), 4, ("stage=4", STAGES)),
    Wrong(zero("mesh"), 5, ("mesh=5", "give a DeviceMesh of one dimension or a group")),
    Wrong(zero("units"), "blocks", ("units='blocks'", 'give "auto", module classes or a predicate')),
    Wrong(zero("reduce"), "max", ("reduce='max'", 'give "mean" or "sum"')),
    Wrong(zero("resident"), "lots", ("resident='lots'", SIZE)),
    Wrong(zero("precision"), "fp8", ("precision='fp8'",)),
    Wrong(zero("gathered"), 0, ("gathered=0", "give a number of stages, 1 or more, or None")),
    Wrong(zero("gathered"), "1", ("gathered='1'", "give a number of stages, 1 or more, or None")),
    Wrong(zero("gathered"), True, ("gathered=True", "give a number of stages, 1 or more, or None")),
    # ---- Cut
    Wrong(cut("at"), "0.1", ("cut.at='0.1'", "give a list of names"), P),
    Wrong(cut("at"), [1], ("cut.at=[1]", "give a list of names"), P),
    Wrong(cut("costs"), 5, ("cut.costs=5", "give a number, 0 or more, for each block"), P),
    Wrong(cut("costs"), ["1"], ("cut.costs=['1']", "give a number, 0 or more, for each block"), P),
    Wrong(cut("costs"), [1.0, math.nan], ("cut.costs=[1.0, nan]", "give a number, 0 or more, for each block"), P),
    Wrong(cut("costs"), [1.0, -1], ("cut.costs=[1.0, -1]", "give a number, 0 or more, for each block"), P),
    Wrong(cut("sample"), torch.ones(2), ("cut.sample=tensor", "give a tuple", "sample=(x,)"), P),
    Wrong(cut("options"), 5, ("cut.options=5", "give a dictionary"), P),
    Wrong(lambda s, value: rg.Cut(at=["1"], costs=value), [1.0], ("cut.at", "cut.costs", "give one of them"), P),
    # ---- Microbatches
    Wrong(lambda s, value: rg.Microbatches(value), 5, ("Microbatches(5)", "give a list"), P),
    Wrong(lambda s, value: rg.Microbatches(value), "ab", ("Microbatches('ab')", "give a list"), P),
    Wrong(lambda s, value: rg.Microbatches(value), {"x": 1}, ("Microbatches({'x': 1})", "give a list"), P),
    # ---- Pipeline
    Wrong(pipeline("model"), None, ("model=None", "give an nn.Sequential, an nn.ModuleList or a list"), P),
    Wrong(pipeline("model"), [1, 2], ("model[0]=1", "give modules"), P),
    Wrong(pipeline("schedule"), 5, ("schedule=5", "give one of", "zb-v"), P),
    Wrong(pipeline("schedule"), None, ("schedule=None", "give one of", "zb-v"), P),
    Wrong(pipeline("microbatches"), 0, ("microbatches=0", "give a whole number, 1 or more"), P),
    Wrong(pipeline("microbatches"), "4", ("microbatches='4'", "give a whole number, 1 or more"), P),
    Wrong(pipeline("microbatches"), 2.0, ("microbatches=2.0", "give a whole number, 1 or more"), P),
    Wrong(pipeline("microbatches"), True, ("microbatches=True", "give a whole number, 1 or more"), P),
    Wrong(pipeline("loss"), "mse", ("loss='mse'", "give a function of output and target, or None"), P),
    Wrong(pipeline("init"), "zeros", ("init='zeros'", "give a function of a module, or None"), P),
    Wrong(pipeline("loss_reduction"), "max", ("loss_reduction='max'", 'give "mean" or "sum"'), P),
    Wrong(pipeline("loss_reduction"), None, ("loss_reduction=None", 'give "mean" or "sum"'), P),
    Wrong(pipeline("mesh"), 5, ("mesh=5", "give a DeviceMesh of one dimension or a group"), P),
    Wrong(pipeline("zero"), 3, ("zero=3", "give rg.Zero(stage=...) or None"), P),
    Wrong(pipeline("zero"), rg.Zero(), ("zero.mesh=None", "rank", 'give the other dimension, as mesh["dp"]'), P),
    Wrong(pipeline("pending"), "lots", ("pending='lots'", 'give bytes or a text like "2GiB"')),
    Wrong(pipeline("pending"), -1, ("pending=-1", "give 0 or more bytes")),
    Wrong(pipeline("timeout"), "60", ("timeout='60'", SECONDS), P),
    Wrong(pipeline("timeout"), 0, ("timeout=0", SECONDS), P),
    Wrong(pipeline("timeout"), math.inf, ("timeout=inf", SECONDS), P),
    Wrong(pipeline("cut"), ["1"], ("cut=['1']", "give rg.Cut(...) or None"), P),
    Wrong(lambda s, value: s.pipe.watch(value), "me", ("told='me'", "give a function of an action, or None"), P),
    Wrong(lambda s, value: s.pipe.train(value), "yes", ("mode='yes'", FLAG), P),
    Wrong(step("args"), torch.ones(1, WIDTH), ("args", "shape [1, 8]", "2 microbatches", "give at least 2 rows"), P),
    Wrong(step("args"), rg.Microbatches([1]), ("args: 1 microbatches", "the schedule has 2", "give 2"), P),
    Wrong(step("target"), torch.ones(()), ("target", "shape []", "2 microbatches", "give at least 2 rows"), P),
    Wrong(step("targt"), torch.ones(4), ("targt", "no block accepts it", "target=..."), P),
    Wrong(lambda s, value: s.pipe.step(target=value), torch.ones(4), ("rank 0", "the first stage", "step(x, ...)"), P),
)


def values(model: nn.Module) -> dict[str, Any]:
    return {name: (id(p), type(p), p.detach().clone()) for name, p in model.named_parameters()}


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(
        one[:2] == other[:2] and torch.equal(one[2], other[2])
        for one, other in zip(before.values(), after.values(), strict=True)
    )


def scene() -> Scene:
    torch.manual_seed(0)
    model = build()
    return Scene(
        build(), model, rg.shard(model), rg.Pipeline(linears(4), schedule="1f1b", microbatches=2, loss=F.mse_loss)
    )


def fault(on: Scene, wrong: Wrong) -> str | None:
    """What is amiss with the error of this call."""
    before = values(on.plain)
    try:
        wrong.call(on, wrong.value)
        return "nothing was raised"
    except Exception as error:  # all of them in one report
        if type(error) is not wrong.kind:
            return f"{type(error).__name__} instead of {wrong.kind.__name__}: {error}"
        if missing := [word for word in wrong.words if word not in str(error)]:
            return f"{missing} not in: {error}"
    if type(on.plain) is not Small or not same(before, values(on.plain)):
        return "the model was changed"
    return None


def table(rank: int, world: int) -> list[str]:
    on = scene()
    faults = []
    for number, wrong in enumerate(WRONG):
        if (text := fault(on, wrong)) is not None:
            faults.append(f"{number}: {wrong.value!r}: {text}")
    loss_of(on.plain, batch(rank)).backward()  # plain, and none the worse
    loss_of(on.model, batch(rank)).backward()
    assert on.engine.full_grad("head.bias") is not None
    assert math.isfinite(on.pipe.step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH)))
    dist.barrier()
    return faults


def test_wrong_arguments(ranks: Ranks) -> None:
    for faults in ranks(2).run(table):
        assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", ("shard", "Pipeline", "compile", "Zero", "Cut"))
def test_the_table_has_every_argument(name: str) -> None:
    assert ASKED[name] == set(inspect.signature(getattr(rg, name)).parameters)


# ---- what is right
def scalars(rank: int, world: int) -> tuple[bool, ...]:
    """Numbers of numpy and torch are numbers."""
    model = build()
    engine = rg.shard(
        model,
        np.int64(3),
        join=np.int32(0),
        resident=torch.tensor(4096),
        exact=np.bool_(True),
        prefetch=False,
        timeout=np.float32(20),
        precision=rg.Precision(reduce=torch.float32),
    )
    loss_of(model, batch(rank)).backward()
    with engine.coalesce(np.int64(100)):
        pass
    norm = engine.clip_grad_norm_(torch.tensor(1.0), "inf")
    pipe = rg.Pipeline(
        linears(4), schedule="1f1b", microbatches=torch.tensor(2), loss=F.mse_loss, cut=rg.Cut(costs=np.ones(4))
    )
    pipe.step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))
    dist.barrier()
    return (
        engine.policy.resident == 4096,
        type(engine.policy.resident) is int,
        engine.policy.exact is True,
        engine.transport.timeout == 20.0,
        pipe.schedule.microbatches == 2,
        bool(norm > 0),
    )


def test_numbers_of_numpy_and_torch(ranks: Ranks) -> None:
    assert ranks(2).run(scalars) == [(True,) * 6] * 2
