"""Sums that are made as soon as all parts are there, or only when ranks meet: it does not show which."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import retrograde as rg
from retrograde.gradients.strategy import OrderedSum
from retrograde.transport import Key, ThreadRanks
from tests import threads
from tests.transport.chains import chains, sharded


@pytest.mark.parametrize("late", (True, False))
def test_a_wide_part_is_not_rounded_while_it_waits(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Gradients wait in fp32, and their sum goes to masters in bf16. Whether the other rank's part has come when this
    one's has to leave its bucket depends on who is faster, and does not show."""
    are_here = OrderedSum._are_here

    def waiting(self: OrderedSum, key: Key, ranks: Sequence[int]) -> bool:
        """The answer that is asked for."""
        deadline = time.monotonic() + 20
        while not late and not are_here(self, key, ranks) and time.monotonic() < deadline:
            time.sleep(0.001)
        return not late

    monkeypatch.setattr(OrderedSum, "_are_here", waiting)
    models = [model.to(torch.bfloat16) for model in chains(2)]
    inputs = torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def program(ranks: ThreadRanks) -> dict[str, Tensor | None]:
        model = models[ranks.rank]
        engine = sharded(ranks, model, precision=rg.Precision(accumulate="fp32"))
        with engine.coalesce():
            for x in inputs[ranks.rank]:
                model(x).sum().backward()
        return engine.full_grads()

    parts: list[dict[str, Tensor]] = []
    for of_rank in inputs:
        (plain,) = chains(1)
        plain.to(torch.bfloat16)
        parts.append({})
        for x in of_rank:
            plain.zero_grad()
            plain(x).sum().backward()
            for name, param in plain.named_parameters():
                assert param.grad is not None
                parts[-1][name] = parts[-1].get(name, torch.zeros(())) + param.grad.float()
    for found in threads.run(2, program):
        for name, got in found.items():
            assert got is not None
            assert got.equal(((parts[0][name] + parts[1][name]) / 2).to(torch.bfloat16)), name
