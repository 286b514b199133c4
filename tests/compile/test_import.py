"""torch.compile is paid for by those who use it, whenever they begin to.

A program of its own, not a rank of tests/harness.py: those have imported everything before they start."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import retrograde as rg
from tests.small import batch, build, loss_of

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, plain = build(), build()
rg.shard(model, 3)
for each in (model, plain):
    loss_of(each, batch(0)).backward()
assert "torch._dynamo" not in sys.modules, "an eager backward has imported Dynamo"
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]


def step(*models):
    for m, optimizer in zip(models, optimizers):
        loss_of(m, batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()


step(model, plain)  # torch's optimizers import it
step(torch.compile(model, backend="aot_eager"), torch.compile(plain, backend="aot_eager"))
state = model.state_dict()
assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
from torch._dynamo.utils import counters
assert counters["stats"]["unique_graphs"] > 1, "nothing was compiled"
print("exact")
"""


def test_dynamo_comes_with_the_first_compiled_call() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip().endswith("exact"), done.stderr
