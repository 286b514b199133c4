"""Train a small character-level GPT in a pipeline, and draw the schedule as planned and as it really ran.

    torchrun --standalone --nproc-per-node=4 examples/pipeline_gpt.py                              2 stages × 2 replicas
    torchrun --standalone --nproc-per-node=2 examples/pipeline_gpt.py --schedule zb-v --replicas 1    4 stages in a V

With replicas, the stages are sharded over them by ZeRO (`--zero`).
"""

import argparse
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import retrograde as rg
from retrograde.pipeline import simulate
from retrograde.pipeline.drawing import from_trace, show

TEXT = Path(__file__).parent / "data" / "logbook.txt"
CONTEXT = 64
WIDTH = 96
HEADS = 4
BLOCKS = 6
BATCH = 16


class Embed(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.place(torch.arange(tokens.shape[1]))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batches(tokens: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts.tolist()])
        yield rows[:, :-1], rows[:, 1:]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="zb-h1")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--zero", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.replicas, args.replicas), mesh_dim_names=("pp", "dp"))
    text = TEXT.read_text()
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([letters[letter] for letter in text])

    torch.manual_seed(7)
    with torch.device("meta"):  # each rank makes only its own stages
        model = nn.Sequential(Embed(len(letters)), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, len(letters)))
    pipe = rg.Pipeline(
        model,
        schedule=args.schedule,
        microbatches=args.microbatches,
        loss=cross_entropy,
        mesh=mesh["pp"],
        zero=rg.Zero(stage=args.zero, mesh=mesh["dp"]) if args.replicas > 1 else None,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    console = Console(quiet=dist.get_rank() != 0)
    data = batches(tokens, seed=mesh["dp"].get_local_rank())
    for step in range(args.steps):
        x, y = next(data)
        loss = pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == args.steps - 1:
            console.print(f"step {step:3d}  loss {loss.item():.3f}")

    ranks: list = [None] * mesh["pp"].size()
    dist.all_gather_object(ranks, [done for done in pipe.trace if done.action.kind.is_compute], mesh["pp"].get_group())
    chunks = pipe.schedule.stages / len(ranks)
    show(simulate(pipe.schedule), f"{pipe.schedule.name}, as planned with F, I and W of equal length", console)
    show(from_trace([done for trace in ranks for done in trace], chunks), "the last step, as it ran (seconds)", console)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
