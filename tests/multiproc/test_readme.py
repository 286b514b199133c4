"""The README's examples run as they stand, on two ranks, and end where plain torch does."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness import Ranks
from tests.reference import mean

README = Path(__file__).parents[2] / "README.md"
STEPS = 2


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out = model(x)
    return F.mse_loss(out, y), out.abs().mean()


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 6, generator=source), torch.randn(4, 3, generator=source)) for _ in range(STEPS)]


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def _trained_plainly(world: int, lr: float) -> nn.Module:
    """Every step the gradients of all ranks, in rank order, as one window leaves them. Without clipping."""
    model = MyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(STEPS):
        by_rank = []
        for rank in range(world):
            main, aux = losses(model, *batches(rank)[step])
            main.backward(retain_graph=True)
            aux.backward()
            by_rank.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
        for param, grads in zip(model.parameters(), zip(*by_rank, strict=True), strict=True):
            param.grad = mean(grads, world)
        optimizer.step()
        optimizer.zero_grad()
    return model


def _first_example(rank: int, world: int, source: str) -> list[str]:
    model = MyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"model": model, "optimizer": optimizer, "batches": batches(rank), "losses": losses}
    exec(source, names)
    plain = _trained_plainly(world, lr=1e-3).state_dict()
    trained = model.state_dict()
    reduced = [entry.unit for entry in names["engine"].ledger.entries if entry.kind == "reduce"]
    dist.barrier()
    assert len(reduced) == STEPS * len(set(reduced)) > 0, "one reduction per unit and window"
    return [name for name in plain if not torch.equal(plain[name], trained[name])]


def test_the_first_example_equals_plain_torch(ranks: Ranks) -> None:
    first, _ = examples()
    assert len(first.splitlines()) == 10
    assert ranks(2).run(_first_example, first) == [[], []]


def _whole_script(rank: int, world: int, source: str, folder: str) -> list[str]:
    names = {"MyModel": MyModel, "batches": batches(rank), "losses": losses}
    with contextlib.chdir(folder):
        exec(source, names)
        dist.barrier()
        saved = torch.load("model.pt")
    assert os.listdir(folder) == ["model.pt"]
    return [name for name, tensor in MyModel().state_dict().items() if tensor.shape != saved[name].shape]


def test_the_whole_script_runs(ranks: Ranks, tmp_path: Path) -> None:
    """The ranks of the pool have their process group already."""
    _, script = examples()
    begin = 'dist.init_process_group("gloo")  # under torchrun\n'
    assert begin in script
    assert ranks(2).run(_whole_script, script.replace(begin, ""), str(tmp_path)) == [[], []]
