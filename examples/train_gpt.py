"""Train a small character-level GPT with ZeRO stage 3 and show that it equals plain torch, bit for bit.

    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py          (or: make demo)

Every step has two losses over one forward: the next character, and the one after it. Each gets its own
backward, so the first one retains the graph. The reference does the same on one device without retrograde.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg

TEXT = Path(__file__).parent / "data" / "logbook.txt"
SEED = 7
AUX_WEIGHT = 0.3
console = Console()


@dataclass(frozen=True)
class Config:
    vocab: int
    context: int = 64
    width: int = 96
    heads: int = 4
    blocks: int = 4
    batch: int = 8
    lr: float = 3e-3


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Two heads on one trunk: `head` predicts the next character, `ahead` the one after it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab)
        self.ahead = nn.Linear(config.width, config.vocab)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x), self.ahead(x)


class Losses(NamedTuple):
    main: Tensor
    aux: Tensor

    def values(self) -> list[float]:
        return [self.main.item(), self.aux.item()]


class Corpus:
    """The text as integers; the batch of a step depends on (step, rank) only."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        alphabet = sorted(set(text))
        self.vocab = len(alphabet)
        index = {char: i for i, char in enumerate(alphabet)}
        self.data = torch.tensor([index[char] for char in text])

    def batch(self, step: int, rank: int, config: Config) -> Tensor:
        generator = torch.Generator().manual_seed(SEED + 1_000 * step + rank)
        span = config.context + 2  # two further characters: the targets of the two losses
        starts = torch.randint(len(self.data) - span, (config.batch,), generator=generator)
        return torch.stack([self.data[start : start + span] for start in starts.tolist()])


def build(config: Config) -> GPT:
    torch.manual_seed(SEED)
    return GPT(config)


def optimizer_for(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    # Not fused: torch's fused CPU kernel rounds the tail of a tensor differently from its body, and a
    # sharded piece has its tail elsewhere. Everything else here is elementwise in the strict sense.
    return torch.optim.AdamW(model.parameters(), lr=config.lr, fused=False)


def losses_of(model: nn.Module, batch: Tensor) -> Losses:
    logits, ahead = model(batch[:, :-2])
    main = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:-1].flatten())
    aux = AUX_WEIGHT * F.cross_entropy(ahead.flatten(0, 1), batch[:, 2:].flatten())
    return Losses(main, aux)


@contextmanager
def progress(title: str, steps: int, show: bool) -> Iterator[Iterator[int]]:
    """Step numbers with a progress bar around them; one line at the end where there is no terminal."""
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, disable=not show) as bar:
        yield iter(bar.track(range(steps), description=title))


def train_sharded(model: GPT, config: Config, corpus: Corpus, steps: int) -> Tensor:
    """What a user writes: nothing in the loop knows that the model is sharded."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = optimizer_for(model, config)
    curve = []
    with progress(f"retrograde, {world} ranks", steps, show=rank == 0) as numbers:
        for step in numbers:
            losses = losses_of(model, corpus.batch(step, rank, config))
            losses.main.backward(retain_graph=True)
            losses.aux.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(losses.values())
    return torch.tensor(curve)


def train_plain(model: GPT, config: Config, corpus: Corpus, steps: int, world: int, show: bool) -> Tensor:
    """The reference: every rank's batch in turn on the same weights, gradients averaged in rank order."""
    parameters = list(model.parameters())
    optimizer = optimizer_for(model, config)
    curve = []
    with progress("plain torch, 1 process", steps, show) as numbers:
        for step in numbers:
            ranks = [losses_of(model, corpus.batch(step, rank, config)) for rank in range(world)]
            first = average([gradients(losses.main, parameters, retain=True) for losses in ranks])
            second = average([gradients(losses.aux, parameters, retain=False) for losses in ranks])
            for parameter, a, b in zip(parameters, first, second, strict=True):
                parameter.grad = sum_of(a, b)
            optimizer.step()
            optimizer.zero_grad()
            curve.append([losses.values() for losses in ranks])
    return torch.tensor(curve).transpose(0, 1)


def sum_of(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def gradients(loss: Tensor, parameters: list[nn.Parameter], retain: bool) -> list[Tensor | None]:
    """The gradients of one plain backward, taken out of `.grad`."""
    loss.backward(retain_graph=retain)
    taken = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def average(per_rank: list[list[Tensor | None]]) -> list[Tensor | None]:
    """The mean over ranks. A parameter that this loss does not reach has no gradient on any rank."""
    means: list[Tensor | None] = []
    for column in zip(*per_rank, strict=True):
        present = [gradient for gradient in column if gradient is not None]
        means.append(sum(present[1:], start=present[0]) / len(per_rank) if present else None)
    return means


def gather_curves(curve: Tensor) -> Tensor:
    curves = [torch.empty_like(curve) for _ in range(dist.get_world_size())]
    dist.all_gather(curves, curve)
    return torch.stack(curves)


def compare(sharded: Tensor, plain: Tensor) -> Table:
    """Curves are [rank, step, loss]; the table shows rank means, identity is that of all the values."""
    steps = sharded.shape[1]
    table = Table(title="loss (mean of the ranks)", title_justify="left")
    for heading in ("step", "main: retrograde", "main: plain torch", "aux: retrograde", "aux: plain torch"):
        table.add_column(heading, justify="right")
    table.add_column("all ranks")
    for step in sorted({*range(0, steps, max(1, steps // 8)), steps - 1}):
        ours, theirs = sharded[:, step].mean(0).tolist(), plain[:, step].mean(0).tolist()
        cells = [f"{value:.9f}" for pair in zip(ours, theirs, strict=True) for value in pair]
        same = torch.equal(sharded[:, step], plain[:, step])
        table.add_row(str(step + 1), *cells, "identical" if same else "[red]different")
    return table


def differing(sharded: dict[str, Tensor], plain: dict[str, Tensor]) -> list[str]:
    if sharded.keys() != plain.keys():
        return sorted(sharded.keys() ^ plain.keys())
    return [name for name, tensor in plain.items() if not torch.equal(sharded[name], tensor)]


def run(steps: int, report: Path) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    corpus = Corpus(TEXT)
    config = Config(vocab=corpus.vocab)

    model = build(config)
    engine = rg.shard(model, stage=3)
    sharded = gather_curves(train_sharded(model, config, corpus, steps))
    weights = model.state_dict()  # full tensors, made by all the ranks together
    account, explanation = engine.report(), engine.explain()

    # Every rank computes the reference, so that none of them waits for another.
    reference = build(config)
    plain = train_plain(reference, config, corpus, steps, world, show=rank == 0)
    wrong = differing(weights, reference.state_dict())
    if rank == 0:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(account + "\n", encoding="utf-8")
        print(f"\n{explanation}\n")
        console.print(compare(sharded, plain))
        print(f"losses that differ from plain torch: {int((sharded != plain).sum())} of {plain.numel()}")
        print(f"tensors that differ after training:  {len(wrong)} of {len(weights)}", *wrong)
        print(f"report: {report}")
    return torch.equal(sharded, plain) and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="A small GPT under ZeRO stage 3, beside plain torch.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--report", type=Path, default=Path("build/demo-report.txt"))
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    same = run(options.steps, options.report)
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
