"""Rows with offload. On the CPU nothing moves, and the same rows run on the test device (tests/accelerator)."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tests.patterns import rows_backward, rows_extra, rows_leaves, rows_model, rows_ranks  # noqa: F401 - come first
from tests.patterns.context import Context
from tests.patterns.models import Batch
from tests.patterns.registry import CASES, add, row

AGAIN = {
    "22": (
        "optimizer",
        (
            "1-plain-mlp",
            "1-plain-gpt",
            "2-accumulate-mlp",
            "6b-two_windows-mlp",
            "7-no_sync-mlp",
            "12-frozen_mid_run-mlp",
        ),
    ),
    "22c": (
        "parameters",
        ("1-plain-mlp", "1-plain-gpt", "3-two_losses-mlp", "6-window_retained-mlp", "24c-edited_full-gpt"),
    ),
}

for key, (offload, ids) in AGAIN.items():
    for place, case in enumerate(CASES[each] for each in ids):
        title = f"offload of {offload}: {case.title}"
        add(replace(case, key=key, title=title, offload=offload, principal=place == 0))


def unused_later(model: nn.Module, batch: Batch, ctx: Context) -> None:
    """A block, and layers of another one, in the first step only."""
    hidden = model.embed(batch.x)
    if ctx.step == 0:
        ctx.loss(model.read(model.walk(hidden)), batch).backward()
    else:
        ctx.loss(model.read(model.blocks[2](model.blocks[1].norm_only(hidden))), batch).backward()


@row("22b", "offload of the optimizer, a parameter that goes unused later", ("mlp", "gpt"), offload="optimizer")
def optimizer_unused_later(model: nn.Module, batch: Batch, ctx: Context) -> None:
    unused_later(model, batch, ctx)


@row("22b", "offload of parameters, a parameter that goes unused later", ("mlp", "gpt"), offload="parameters")
def parameters_unused_later(model: nn.Module, batch: Batch, ctx: Context) -> None:
    unused_later(model, batch, ctx)
