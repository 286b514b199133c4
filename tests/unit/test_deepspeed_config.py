"""DeepSpeed's config without ranks: what each key becomes, what is refused and in which words, schedules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import retrograde as rg
import retrograde.deepspeed as deepspeed
import retrograde.deepspeed.zero
from retrograde.deepspeed import ConfigError, NotYetError
from retrograde.deepspeed.utils import set_z3_leaf_modules, z3_leaf_module
from retrograde.integrations.deepspeed.config import BatchSizes, Config, Section
from retrograde.integrations.deepspeed.optimizers import make_optimizer
from retrograde.integrations.deepspeed.schedules import make_scheduler
from retrograde.integrations.deepspeed.words import (
    CALLS,
    MISSING,
    SYNONYMS,
    WORDS,
    Kind,
    Standing,
    Word,
    calls_markdown,
    markdown,
    missing,
)
from tests.unit.marks import between_marks

PAGE = "from_deepspeed.md"
LEAST = {"train_batch_size": 8}


def _nested(key: str, value: Any) -> dict[str, Any]:
    """`{"a": {"b": value}}` of "a.b"."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _asked(key: str, value: Any) -> Config:
    given = _nested(key, value)
    return Config.of(LEAST | given if key != "train_batch_size" else given, world=2)


# ---- the table
def test_every_key_is_there_once() -> None:
    keys = [word.key for word in WORDS]
    assert len(set(keys)) == len(keys)
    sections = {key.partition(".")[0] for key in keys}
    assert set(SYNONYMS.values()) <= {*keys, *sections} and not set(SYNONYMS) & {*keys, *sections}


def test_the_table_in_the_docs_is_this_one() -> None:
    """`words.markdown()` and `words.calls_markdown()` print what belongs between the marks."""
    for mark, table in (("keys", markdown()), ("calls", calls_markdown())):
        assert between_marks(PAGE, mark) == f"{table}\n"


def test_every_word_of_the_engine_is_in_the_table() -> None:
    engine = deepspeed.DeepSpeedEngine
    own = {name for name in vars(engine) if not name.startswith("_")} - {"forward"}
    named = {call.name for call in CALLS}
    assert {name for name in named if "." not in name} == own
    for name in named - own:
        module, _, function = name.partition(".")
        assert hasattr(getattr(deepspeed, module), function), name
    assert all(call.name in call.theirs for call in CALLS)


# A value of the right type by which a config asks for something.
_ON: dict[Kind, Any] = {Kind.BOOL: True, Kind.WHOLE: 4, Kind.TEXT: "bf16", Kind.ANYTHING: 4, Kind.SECTION: {"any": 1}}
_ON[Kind.NUMBER] = 0.5


@pytest.mark.parametrize(
    "word", [word for word in WORDS if word.standing is Standing.NOT_YET], ids=lambda word: word.key
)
def test_what_is_not_there_yet_is_refused_by_name(word: Word) -> None:
    on = {word.switch: "cpu" if word.switch == "device" else 2} if word.switch else _ON[word.kind]
    with pytest.raises(NotYetError, match=rf"^{word.named}: .* is not there yet; leave it out, or turn it off$"):
        _asked(word.key, on)


@pytest.mark.parametrize(
    ("key", "off"),
    [
        ("bf16.enabled", False),
        ("bf16.bf16_optimizer_states", False),
        ("data_types.param_dtype", "fp32"),
        ("zero_optimization.offload_optimizer.device", "none"),
        ("zero_optimization.offload_optimizer.ratio", 1.0),
        ("zero_optimization.offload_param.device", None),
        ("zero_optimization.cpu_offload", False),
        ("zero_optimization.mics_shard_size", -1),
        ("data_types.grad_accum_dtype", "fp32"),
        ("sequence_parallel_size", 1),
    ],
)
def test_what_is_turned_off_is_taken(key: str, off: Any) -> None:
    assert _asked(key, off).asked[key] == off


@pytest.mark.parametrize("name", MISSING)
def test_arguments_that_are_not_there_yet_say_so(name: str) -> None:
    error = missing(name)
    assert isinstance(error, rg.UnsupportedError | NotImplementedError)
    assert str(error).startswith(f"{name}: ") and "is not there yet; " in str(error)


def test_keys_without_effect_are_known() -> None:
    config = Config.of(LEAST | {"zero_optimization": {"overlap_comm": True, "stage": 2}, "steps_per_print": 5}, 1)
    assert [word.key for word in config.idle] == ["zero_optimization.overlap_comm", "steps_per_print"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero_optimization": {"stage": "3"}}, r"zero_optimization\.stage='3' has another type; give a whole number"),
        ({"zero_optimization": {"stage": True}}, r"zero_optimization\.stage=True has another type"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage=4 is out of range; give 0, 1, 2 or 3"),
        ({"zero_optimization": True}, r"zero_optimization=True has another type; give a section"),
        (
            {"zero_optimization": {"stag": 2}},
            r"zero_optimization\.stag: .* mean zero_optimization\.stage\?",
        ),
        ({"gradient_cliping": 1.0}, r"gradient_cliping: is not a key that is known; did you mean gradient_clipping\?"),
        ({"gradient_clipping": "auto"}, r"gradient_clipping='auto' has another type; give a number, 0 or more"),
        ({"gradient_clipping": -1}, r"gradient_clipping=-1 has another type"),
        ({"communication_data_type": "int8"}, r"communication_data_type='int8' is not known; give \"fp32\""),
        ({"gradient_accumulation_dtype": "int8"}, r"data_types\.grad_accum_dtype='int8' is not known; give \"fp32\""),
        (
            {"fp16": {"enabled": True}, "bfloat16": {"enabled": True}},
            r"fp16\.enabled: bf16\.enabled is there too; leave",
        ),
        ({"gradient_allreduce_op": "max"}, r"gradient_allreduce_op='max' is not known"),
        ({"optimizer": {"params": {}}}, r"optimizer\.type=None is not a name"),
        ({"scheduler": {"type": "WarmupLR", "params": 3}}, r"scheduler\.params=3 has another type"),
        ({"train_batch_size": 7}, r"train_batch_size=7 is not train_micro_batch_size_per_gpu=3 × .*=1 × 2 ranks"),
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps=0"),
    ],
)
def test_wrong_configs_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.of(LEAST | given, world=2)


def test_a_config_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}}')
    assert Config.of(str(file), 2).stage == 3
    for text, message in (
        ('{"train_batch_size": 8, "train_batch_size": 4}', "train_batch_size: is there twice in one section"),
        ("{", "is not JSON"),
        ("[]", r"config=\[\] is not a section"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            Config.of(file, 2)
    with pytest.raises(ConfigError, match=r"config='.*nothing\.json' is not a file"):
        Config.of(str(tmp_path / "nothing.json"), 2)
    with pytest.raises(ConfigError, match="config=3 is not a config"):
        Config.of(3, 2)  # type: ignore[arg-type]


# ---- what keys become
@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((8, None, None), (8, 4, 1)),
        ((None, 3, None), (6, 3, 1)),
        ((None, 3, 4), (24, 3, 4)),
        ((24, 3, None), (24, 3, 4)),
        ((24, None, 4), (24, 3, 4)),
        ((24, 3, 4), (24, 3, 4)),
    ],
)
def test_batch_sizes(given: tuple[Any, ...], sizes: tuple[int, int, int]) -> None:
    assert BatchSizes.of(*given, world=2) == BatchSizes(*sizes)


@pytest.mark.parametrize("given", [(None, None, None), (None, None, 2), (24, 5, None), (1, None, None), (8, 3, 4)])
def test_batch_sizes_that_do_not_fit(given: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="train_batch_size"):
        BatchSizes.of(*given, world=2)


def _resident(**zero: int) -> int:
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(16))  # 1024, 32, 16 and 16 elements
    return Config.of(LEAST | {"zero_optimization": {"stage": 3, **zero}}, 2).residency.budget(model)


def test_thresholds_are_a_resident_budget() -> None:
    assert _resident() == 0
    assert _resident(stage3_param_persistence_threshold=16) == 2 * 64
    assert _resident(param_persistence_threshold=32) == 2 * 64 + 128
    assert _resident(stage3_param_persistence_threshold=32, stage3_model_persistence_threshold=20) == 80
    assert _resident(stage3_max_live_parameters=1000) == 4000
    assert _resident(stage3_max_live_parameters=1000, stage3_max_reuse_distance=10) == 40
    assert _resident(max_reuse_distance=10, stage3_param_persistence_threshold=16) == 40 + 128


def test_prefetch_precision_and_reduction() -> None:
    assert _asked("zero_optimization.stage3_prefetch_bucket_size", 0).prefetch is False
    assert _asked("zero_optimization.stage3_prefetch_bucket_size", 5e7).prefetch is True
    assert _asked("communication_data_type", "FP16").precision == rg.Precision(reduce="fp16")
    assert _asked("gradient_allreduce_op", "sum").reduce == "sum"
    assert Config.of(LEAST, 2).precision == rg.Precision() and Config.of(LEAST, 2).stage == 0
    assert _asked("bf16.enabled", True).precision == rg.Precision(param="bf16")
    assert _asked("gradient_accumulation_dtype", "fp32").precision == rg.Precision(accumulate="fp32")


def test_offload() -> None:
    nothing, optimizer, parameters = rg.Offload
    zero = "zero_optimization."
    assert Config.of(LEAST, 2).offload is _asked(zero + "offload_param", None).offload is nothing
    assert _asked(zero + "offload_optimizer", {"device": "none", "pin_memory": True}).offload is nothing
    assert _asked(zero + "offload_optimizer", {"device": "cpu", "pin_memory": True}).offload is optimizer
    assert _asked(zero + "cpu_offload", True).offload is optimizer
    assert _asked(zero + "offload_param", {"device": "cpu"}).offload is parameters
    assert _asked(zero + "cpu_offload_param", True).offload is parameters
    both = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    assert Config.of(LEAST | {"zero_optimization": both}, 2).offload is parameters


@pytest.mark.parametrize("section", ("offload_optimizer", "offload_param"))
def test_offload_to_disks_is_refused_by_name(section: str) -> None:
    key = f"zero_optimization.{section}"
    with pytest.raises(NotYetError, match=rf"^{key}\.device: offload to disks is not there yet; \"cpu\" or \"none\""):
        _asked(key, {"device": "nvme", "nvme_path": "/local"})
    with pytest.raises(ConfigError, match=rf"^{key}\.device='disk' is not known; give \"cpu\" or \"none\""):
        _asked(key, {"device": "disk"})
    with pytest.raises(ConfigError, match=rf"^{key}\.devise: is not a key that is known; did you mean {key}\.device"):
        _asked(key, {"devise": "cpu"})


# ---- marks
@pytest.mark.parametrize("kind", (nn.ModuleList, "ModuleList", "torch.nn.modules.container.ModuleList"))
def test_leaf_modules_are_marked(kind: Any) -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2))
    assert set_z3_leaf_modules(model, [kind]) == [model[0]]
    assert z3_leaf_module(model[0]) and not z3_leaf_module(model[1]) and not z3_leaf_module(model)


# ---- optimizers
def _made(kind: str, **params: Any) -> torch.optim.Optimizer:
    bias = nn.Parameter(torch.ones(2))
    return make_optimizer(Section("optimizer", kind, params), [bias], {bias: "head.bias"})


def test_muon_with_deepspeeds_names() -> None:
    first, second = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3, 2))
    asked = {"lr": 0.5, "muon_lr": 0.25, "adam_lr": 0.125, "momentum": 0.5, "betas": [0.5, 0.5], "eps": 1.0}
    section = Section("optimizer", "Muon", {**asked, "ns_method": "standard"})
    made = make_optimizer(
        section, [{"params": [first]}, {"params": [second], "momentum": 0.75}], {first: "up", second: "down"}
    )
    assert type(made) is torch.optim.Muon
    assert [(group["lr"], group["momentum"], group["weight_decay"]) for group in made.param_groups] == [
        (0.25, 0.5, 0.0),
        (0.25, 0.75, 0.0),
    ]
    assert make_optimizer(Section("optimizer", "muon", {}), [first], {first: "up"}).defaults["lr"] == 0.02
    with pytest.raises(NotYetError, match=r"optimizer\.type: Muon with .*\(tok_embed\.weight, of shape \(2, 3\)\)"):
        make_optimizer(section, [second, first], {first: "tok_embed.weight", second: "down"})
    with pytest.raises(ConfigError, match=r"optimizer\.params\.ns_method='svd' is not known; give 'gram' or"):
        make_optimizer(Section("optimizer", "Muon", {"ns_method": "svd"}), [first], {first: "up"})


def test_optimizers() -> None:
    assert type(_made("Adam")) is torch.optim.AdamW and _made("Adam").defaults["weight_decay"] == 0.0
    assert type(_made("Adam", adam_w_mode=False)) is torch.optim.Adam
    assert type(_made("AdamW", adam_w_mode=False)) is torch.optim.AdamW
    assert _made("adamw", torch_adam=True).defaults["weight_decay"] == 1e-2
    assert _made("AdamW", betas=[0.5, 0.25], bias_correction=True).defaults["betas"] == (0.5, 0.25)
    assert type(_made("Adagrad")) is type(_made("adagrad")) is torch.optim.Adagrad
    assert type(_made("SGD", lr=0.5)) is torch.optim.SGD
    assert type(_made("RMSprop")) is torch.optim.RMSprop


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("OneBitAdam", {}, r"optimizer\.type: OneBitAdam is not there yet; give initialize\(optimizer=\.\.\.\)"),
        (
            "Muon",
            {},
            r"optimizer\.type: Muon with .*\(head\.bias, of shape \(2,\)\).* model_parameters that are",
        ),
        ("Lamb", {}, r"optimizer\.type: Lamb is not there yet"),
        ("Sgd", {}, r"optimizer\.type='Sgd' is not known"),
        ("Optimizer2", {}, r"optimizer\.type='Optimizer2' is not known"),
        ("Adam", {"max_grad_norm": 1.0}, r"optimizer\.params\.max_grad_norm: .* give that instead"),
        ("Adam", {"bias_correction": False}, r"optimizer\.params\.bias_correction=False is not there"),
        ("Adam", {"learning_rate": 1.0}, r"optimizer\.params: AdamW refuses .*learning_rate"),
        ("SGD", {"lr": -1.0}, r"optimizer\.params: SGD refuses .*Invalid learning rate"),
    ],
)
def test_optimizers_that_are_refused(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(rg.RetrogradeError, match=message):
        _made(kind, **params)


# ---- schedules
def _rates(kind: str, updates: int, **params: Any) -> list[float]:
    """Before each update, and after the last."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.5)
    scheduler = make_scheduler(Section("scheduler", kind, params), optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(updates):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_warmup() -> None:
    linear = {"warmup_num_steps": 4, "warmup_type": "linear"}
    assert _rates("WarmupLR", 6, warmup_min_lr=1.0, warmup_max_lr=3.0, **linear) == [1, 1, 1.5, 2, 2.5, 3, 3]
    assert _rates("WarmupLR", 5, **linear)[-1] == 0.5  # the optimizer's own
    logarithmic = _rates("WarmupLR", 4, warmup_max_lr=1.0, warmup_num_steps=8)
    assert logarithmic == [0, 0, *(math.log(n) / math.log(8) for n in (2, 3, 4))]
    decayed = _rates("WarmupDecayLR", 8, total_num_steps=6, warmup_max_lr=1.0, warmup_num_steps=2, warmup_type="linear")
    assert decayed == [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]
    cosine = _rates("WarmupCosineLR", 6, total_num_steps=4, warmup_num_steps=2, warmup_type="linear", cos_min_ratio=0.0)
    assert cosine == pytest.approx([0, 0, 0.25, 0.25, 0, 0, 0], abs=1e-15)


def test_range_test_and_one_cycle() -> None:
    assert _rates("LRRangeTest", 3, lr_range_test_min_lr=1.0, lr_range_test_step_size=2) == [1, 1.5, 2, 2.5]
    staircase = {"lr_range_test_staircase": True, "lr_range_test_step_size": 2, "lr_range_test_min_lr": 1.0}
    assert _rates("LRRangeTest", 3, **staircase) == [1, 1, 2, 2]
    cycle = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2}
    assert _rates("OneCycle", 4, **cycle) == [1, 2, 3, 2, 1]
    decayed = _rates("OneCycle", 7, **cycle, decay_step_size=1, decay_lr_rate=1.0)
    assert decayed[5:] == [1 / 2, 1 / 3, 1 / 4]


def test_one_cycle_moves_the_momentum_the_other_way() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    params = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "cycle_max_mom": 1.0}
    scheduler = make_scheduler(Section("scheduler", "OneCycle", params | {"cycle_min_mom": 0.5}), optimizer)
    seen = []
    for _ in range(3):
        seen.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        scheduler.step()
    assert seen == [(0.5, 0.99), (0.75, 0.99), (0.5, 0.99)]


def test_a_schedule_goes_on_from_its_state() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    section = Section("scheduler", "LRRangeTest", {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 1})
    scheduler = make_scheduler(section, optimizer)
    scheduler.load_state_dict(json.loads(json.dumps({"last_batch_iteration": 3})))
    assert optimizer.param_groups[0]["lr"] == 5.0 and scheduler.state_dict() == {"last_batch_iteration": 3}


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("Cosine", {}, r"scheduler\.type='Cosine' is not known; give LRRangeTest or OneCycle or WarmupLR"),
        ("WarmupLR", {"warmup": 3}, r"scheduler\.params: WarmupLR refuses .*'warmup'"),
        ("WarmupLR", {"warmup_type": "cubic"}, r"scheduler\.params\.warmup_type='cubic' is not known"),
        ("OneCycle", {}, r"scheduler\.params: OneCycle refuses .*cycle_min_lr"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, r"lr_range_test_step_size=0 is too small"),
    ],
)
def test_schedules_that_are_refused(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _rates(kind, 0, **params)
