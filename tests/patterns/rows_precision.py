"""Rows once more, with pages in bf16 and masters in fp32.

The reference computes with a bf16 model and trains one in fp32. Not among them: rows in which a program computes with
`model.parameters()` itself or edits `module.weight`, which are masters and pages here (docs/design/precision.md), and
rows whose data are fp32."""

from __future__ import annotations

from dataclasses import replace

from tests.patterns import rows_backward, rows_extra, rows_leaves, rows_model, rows_ranks  # noqa: F401 - come first
from tests.patterns.registry import CASES, add

ROWS = {
    "33": ("1-plain-mlp", "1-plain-gpt", "1-plain-tied-gpt", "17-called_twice-mlp", "10-tied-cross-mlp"),
    "33b": ("3-two_losses-mlp", "4-same_loss_twice-mlp", "5-backwards_in_reverse-mlp", "27-never_zeroed-mlp"),
    "33c": ("6-window_retained-mlp", "6-window_zeroed-mlp", "7-no_sync-mlp"),
    "33d": ("13-remat-gpt-remat-inside", "13-remat-mlp-reentrant-around", "9c-rerun-mlp", "8-grad_cache-mlp"),
    "33e": ("14-penalise_inputs-mlp", "14c-backward_of_some-mlp", "18-backward_raises-mlp", "28-stale_graph-mlp"),
    "33f": ("12-frozen_mid_run-mlp", "12-unfrozen_mid_run-mlp", "30-lora_after-mlp", "24-step_in_hook-mlp"),
    "33g": ("24c-edited_leaves-mlp", "24b-edited_grads-mlp", "31n-filled_anew-mlp", "31q-through_a_checkpoint-mlp"),
    "33h": ("31e-muon-mlp", "31d-adafactor-mlp", "31f-lamb-mlp", "31h-unknown_optimizer-mlp", "31g-lbfgs-mlp"),
    "33i": ("11e-unequal_backwards-mlp", "11c-changing_units-mlp", "11f-replicated-mlp"),
}

for key, ids in ROWS.items():
    for place, case in enumerate(CASES[each] for each in ids):
        title = f"bf16 pages, fp32 masters: {case.title}"
        add(replace(case, key=key, title=title, precision="bf16", principal=place == 0))
