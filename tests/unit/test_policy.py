"""Stages as data, sizes as text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from retrograde import ShardingError
from retrograde.layout import Dtypes, Policy, Precision, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        (0, 0),
        (17, 17),
        (2.5, 2.5),
        (math.inf, math.inf),
        ("0", 0),
        ("512", 512),
        ("512b", 512),
        ("1KiB", 1024),
        ("2 GiB", 2 * 2**30),
        (" 1.5 MiB ", 1.5 * 2**20),
        ("3kb", 3000),
        ("2GB", 2 * 10**9),
        (".5mib", 2**19),
    ),
)
def test_sizes(text: Any, expected: float) -> None:
    assert parse_bytes(text, "resident") == expected


@pytest.mark.parametrize(
    "text", ("", "much", "GiB", "1.2.3GiB", ".", "2 parsecs", "-1GiB", "1GiB 2", "1e3", "0x10", None, math.nan)
)
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ShardingError, match=r"^budget=.*(not a size|negative)"):
        parse_bytes(text, "budget")


def test_negative_sizes() -> None:
    with pytest.raises(ShardingError, match=r"resident=-5 is negative; give 0 or more bytes"):
        parse_bytes(-5, "resident")


def test_stages_are_two_numbers() -> None:
    one, two, three = (Policy.of(stage, 0, "mean", True) for stage in (1, 2, 3))
    assert (one.keeps_pages, one.until_step) == (True, True)
    assert (two.keeps_pages, two.until_step) == (True, False)
    assert (three.keeps_pages, three.until_step, three.resident) == (False, False, 0)
    assert Policy.of(3, "1KiB", "sum", False) == Policy(resident=1024, until_step=False, mean=False, prefetch=False)
    assert Policy.of(2, "1KiB", "mean", True).resident == math.inf, "stages 1 and 2 keep every page"
    assert Policy.of(3, math.inf, "mean", True).keeps_pages
    with pytest.raises(AttributeError):
        three.resident = 1  # type: ignore[misc]


@pytest.mark.parametrize("stage", (0, 4, -1, "3", None))
def test_stages_out_of_range(stage: Any) -> None:
    with pytest.raises(ShardingError, match=r"stage=.* is out of range; give 1, 2 or 3"):
        Policy.of(stage, 0, "mean", True)


@pytest.mark.parametrize("reduce", ("max", "", None, "MEAN"))
def test_unknown_reductions(reduce: Any) -> None:
    with pytest.raises(ShardingError, match=r'reduce=.* is not known; give "mean" or "sum"'):
        Policy.of(3, 0, reduce, True)


def test_gradients_do_not_travel_in_what_cannot_be_added_up() -> None:
    with pytest.raises(ShardingError, match=r"precision.reduce=torch.float8_e4m3fn is not known; give fp32, bf16"):
        Precision(reduce=torch.float8_e4m3fn)


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("precision", "own", "kept", "wanted"),
    (
        (None, BF16, False, (BF16, BF16)),
        (Precision(reduce="fp32"), BF16, False, (BF16, BF16)),
        ("bf16", FP32, False, (BF16, FP32)),
        ("bf16", BF16, False, (BF16, FP32)),
        ("bf16", FP32, True, (FP32, FP32)),
        ("bf16", torch.int64, False, (torch.int64, torch.int64)),
        ("bf16", torch.complex64, False, (torch.complex64, torch.complex64)),
        ("fp16", FP32, False, (torch.float16, FP32)),
        (Precision(param="bf16"), FP64, False, (BF16, FP64)),
        (Precision(param=BF16, master=FP64), FP32, False, (BF16, FP64)),
        (Precision(master="fp32"), BF16, False, (BF16, FP32)),
        (Precision(master="fp32"), BF16, True, (FP32, FP32)),
    ),
)
def test_dtypes_of_parameters(precision: Any, own: torch.dtype, kept: bool, wanted: tuple[Any, Any]) -> None:
    assert Precision.of(precision).dtypes(own, kept) == Dtypes(*wanted)


def test_masters_hold_what_pages_hold() -> None:
    for precision in (Precision(param="fp32", master="bf16"), Precision(param="fp16", master="bf16")):
        with pytest.raises(ShardingError, match=r"precision.master=.* cannot hold what .* can; give a wider dtype"):
            precision.dtypes(FP32)


@pytest.mark.parametrize("field", ("param", "reduce", "master", "accumulate", "output"))
def test_unknown_dtypes(field: str) -> None:
    with pytest.raises(ShardingError, match=rf"precision.{field}='int8' is not known; give fp32, bf16"):
        Precision(**{field: "int8"})


def test_what_precision_is_not() -> None:
    with pytest.raises(ShardingError, match=r"precision='int8' is not known; give rg.Precision\(...\), one of"):
        Policy.of(3, 0, "mean", True, "int8")
    with pytest.raises(ShardingError, match=r"precision.keep: 'norms' is not a module class; give classes such as"):
        Precision(param="bf16", keep=["norms"])  # type: ignore[list-item]
    with pytest.raises(ShardingError, match=r"precision.inputs=1 is neither true nor false"):
        Precision(inputs=1)  # type: ignore[arg-type]


def test_the_same_in_other_words() -> None:
    one = Precision(param="bf16", keep=nn.LayerNorm)
    other = Precision(param=torch.bfloat16, keep=[nn.LayerNorm], master=None)
    assert one.meaning == other.meaning != Precision(param="bf16").meaning
