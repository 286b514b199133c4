"""Programs that come by the waits of the engine, for mutations.py: each returns what is to be seen of it in the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import retrograde as rg
from tests.accelerator import device
from tests.accelerator.pipelines import pipeline_of
from tests.accelerator.pipelines import step as pipeline_step
from tests.accelerator.training import build
from tests.meshes import mesh_of
from tests.patterns.models import SPECS, Batch
from tests.pipeline.cases import CASES


class _Scene:
    """A sharded model, and what is seen of it in the end."""

    def __init__(self, rank: int, name: str = "mlp", timeout: float = 20.0, replicas: int = 1, **options: Any) -> None:
        self.rank = rank
        self.where = device.of_rank(rank)
        self.spec = SPECS[name]
        self.model = build(name, self.where)
        mesh = mesh_of(replicas, dist.get_world_size())
        self.engine = rg.shard(self.model, timeout=timeout, mesh=mesh, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.values: list[Tensor] = []

    def batch(self, step: int) -> Batch:
        """Without waiting."""
        return Batch(
            *(tensor.pin_memory().to(self.where, non_blocking=True) for tensor in self.spec.batch(self.rank, step))
        )

    def loss(self, step: int, **how: Any) -> Tensor:
        x, y = self.batch(step)
        return self.spec.loss(self.model(x, **how), y)

    def embedded(self, step: int) -> Tensor:
        """What takes the root's page alone."""
        return self.model.inp(self.batch(step).x).sum().detach()  # type: ignore[no-any-return, operator, union-attr]

    def step(self, step: int, **how: Any) -> None:
        """`how`: for the model's forward."""
        loss = self.loss(step, **how)
        loss.backward()
        self.values.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def edit(self) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(0.5)

    def halve_gradients(self) -> None:
        for param in self.model.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)

    def linears(self) -> list[nn.Linear]:
        return [module for module in self.model.modules() if isinstance(module, nn.Linear)]

    def seen(self) -> list[Tensor]:
        weights = [param.full_tensor() for param in self.model.parameters()]  # type: ignore[attr-defined]
        return [value.detach().cpu() for value in (*self.values, *weights)]


def steps(rank: int, **options: Any) -> list[Tensor]:
    scene = _Scene(rank, "gpt", **options)
    for number in range(3):
        scene.step(number)
    return scene.seen()


def changed(rank: int, **options: Any) -> list[Tensor]:
    """Gradients are used between backward and step."""
    scene = _Scene(rank, **options)
    for number in range(2):
        scene.loss(number).backward()
        scene.halve_gradients()
        scene.optimizer.step()
        scene.optimizer.zero_grad()
    return scene.seen()


def clipped(rank: int, **options: Any) -> list[Tensor]:
    """Norms are put together from every rank's."""
    scene = _Scene(rank, **options)
    for number in range(2):
        scene.loss(number).backward()
        scene.values.append(nn.utils.clip_grad_norm_(scene.model.parameters(), 0.1))
        scene.optimizer.step()
        scene.optimizer.zero_grad()
    return scene.seen()


def twice(rank: int, **options: Any) -> list[Tensor]:
    """Two backwards, with nothing that waits between them."""
    scene = _Scene(rank, **options)
    for number in range(2):
        for part in range(2):
            scene.loss(2 * number + part).backward()
        scene.optimizer.step()
        scene.optimizer.zero_grad()
    return scene.seen()


def two_streams(rank: int, **options: Any) -> list[Tensor]:
    """Backwards on three streams add to the same gradients; only before the step are they ordered by the program."""
    scene = _Scene(rank, **options)
    scene.step(0)
    sides = [torch.Stream(scene.where) for _ in range(2)]
    main = torch.accelerator.current_stream(scene.where)
    for side in sides:
        side.wait_stream(main)
    with scene.engine.no_sync():
        for number, side in enumerate(sides):
            with side:
                scene.loss(number).backward()
    scene.loss(3).backward()
    for side in sides:
        main.wait_stream(side)
    scene.optimizer.step()
    scene.optimizer.zero_grad()
    scene.step(4)
    return scene.seen()


def window(rank: int, **options: Any) -> list[Tensor]:
    """More gradients wait than the pool keeps buffers for."""
    scene = _Scene(rank, "gpt", units=nn.Linear, **options)
    scene.step(0)
    with scene.engine.no_sync():
        for number in range(2):
            scene.loss(number).backward()
    scene.step(3)
    return scene.seen()


def edits(rank: int, **options: Any) -> list[Tensor]:
    """Reads between edits, on ranks of which one is ahead of the other, and a page that is held over a step."""
    scene = _Scene(rank, **options)
    scene.step(0)
    held = scene.linears()[0].weight
    scene.step(1)
    scene.values.append(held.detach().sum())
    for _ in range(2):
        scene.edit()
        scene.values.append(scene.loss(2).detach())
    with torch.no_grad():
        scene.linears()[-1].weight.add_(1.0)  # a full tensor, of which a part goes into the shard
    scene.values.append(scene.loss(3).detach())
    scene.step(4)
    return scene.seen()


@contextlib.contextmanager
def _refusing(module: nn.Module) -> Iterator[None]:
    """A backward that comes to it raises."""

    def refuse(*args: object) -> None:
        raise ValueError("given up")

    handle = module.register_full_backward_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def given_up(rank: int, **options: Any) -> list[Tensor]:
    """A backward raises on every rank after the first gradients were sent."""
    scene = _Scene(rank, **options)
    loss = scene.loss(0)
    with contextlib.suppress(ValueError), _refusing(scene.linears()[0]):
        scene.loss(1).backward()
    del loss
    scene.optimizer.zero_grad()
    scene.step(2)
    return scene.seen()


def masters(rank: int, **options: Any) -> list[Tensor]:
    scene = _Scene(rank, precision="bf16", **options)
    scene.step(0)
    scene.values += [value.float() for value in scene.model.state_dict().values()]
    scene.step(1)
    return scene.seen()


def stray(rank: int, **options: Any) -> list[Tensor]:
    """Rank 1 evaluates alone, and is OUT until the step; then rank 0 does, while rank 1 waits for it elsewhere."""
    scene = _Scene(rank, timeout=6.0, **options)
    for number in range(3):
        scene.step(number)
    for alone in (1, 0):
        if rank == alone:
            with torch.no_grad():
                scene.values.append(scene.loss(7))
        if alone == 0:
            dist.barrier()
        scene.step(3 + alone)
    scene.step(5)
    return scene.seen()


def captured(rank: int, **options: Any) -> list[Tensor]:
    """What one rank captures the other adds to `.grad`."""
    scene = _Scene(rank, **options)
    scene.step(0)
    params = [param for param in scene.model.parameters() if param.requires_grad]
    if rank == 0:
        scene.values += [grad.local for grad in torch.autograd.grad(scene.loss(1), params)]  # type: ignore[attr-defined]
    else:
        scene.loss(1).backward()
    scene.halve_gradients()
    scene.optimizer.step()
    scene.optimizer.zero_grad()
    return scene.seen()


def evaluated_then_edited(rank: int, **options: Any) -> list[Tensor]:
    """What is computed of weights has not run yet when they are edited, on the host if they are there."""
    scene = _Scene(rank, **options)
    for number in range(3):
        scene.step(number)
        scene.values.append(scene.loss(7).detach())
        scene.edit()
        scene.values.append(scene.loss(8).detach())
    return scene.seen()


def worked_before_a_step(rank: int, **options: Any) -> list[Tensor]:
    """Memory that the program has written to since the backward is free again when gradients that waited are summed."""
    scene = _Scene(rank, **options)
    for number in range(2):
        scene.loss(number).backward()
        torch.ones(4096, device=scene.where).mul_(2.0)
        scene.optimizer.step()
        scene.optimizer.zero_grad()
    return scene.seen()


class _Forked(nn.Module):
    """Two ways, of which one has half as many elements: what a rank gets of the sum of the other is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.narrow = nn.Linear(4, 4), nn.Linear(4, 24), nn.Linear(4, 12)

    def forward(self, x: Tensor, wide: bool) -> Tensor:
        way = self.wide if wide else self.narrow
        return way(self.first(x)).square().mean()  # type: ignore[no-any-return]


def held_then_edited(rank: int, **options: Any) -> list[Tensor]:
    """The last page that is used is there, since somebody holds it, and is gathered all the same."""
    scene = _Scene(rank, **options)
    scene.step(0)
    held = scene.model.get_submodule("head").weight
    for number in range(1, 3):
        scene.values.append(scene.loss(7).detach())
        scene.edit()
        scene.step(number)
    return [*scene.seen(), held.detach().cpu()]  # type: ignore[operator, union-attr]


def given_up_on_another_way(rank: int, **options: Any) -> list[Tensor]:
    """What was sent before a backward raised may still be coming when another unit's gradient takes the memory."""
    where = device.of_rank(rank)
    torch.manual_seed(0)
    model = _Forked()
    device.move(model, where)
    engine = rg.shard(model, units=nn.Linear, timeout=20.0, **options)
    x = torch.full((2, 4), 0.5 + rank).pin_memory().to(where, non_blocking=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(x, wide=False)  # the page of that way is there from now on
    with contextlib.suppress(ValueError), _refusing(model.first):
        model(x, wide=True).backward()
    optimizer.zero_grad()
    model(x, wide=False).backward()
    return [grad.cpu() for grad in engine.full_grads().values() if grad is not None]


def other_order(rank: int, **options: Any) -> list[Tensor]:
    """Rank 1 reads one-sidedly what rank 0 gathers."""
    scene = _Scene(rank, timeout=10.0, **options)
    for number in range(4):
        scene.step(number)
    for number in range(4, 6):
        scene.step(number, path=[2, 0, 1] if rank == 1 else None)
    return scene.seen()


def one_backward_fewer(rank: int, **options: Any) -> list[Tensor]:
    """What rank 0 has of a second backward is added to what rank 1 has of its only one."""
    scene = _Scene(rank, timeout=6.0, **options)
    for number in range(5):
        for part in range(1 if rank == 1 and number == 3 else 2):
            scene.loss(2 * number + part).backward()
        scene.optimizer.step()
        scene.optimizer.zero_grad()
    return scene.seen()


def behind(rank: int, **options: Any) -> list[Tensor]:
    """Rank 1 waits for its device, where it gathers pages that rank 0 will want later, which keeps them until then.
    What rank 0 computes from its own weights meanwhile has not run yet. Then rank 0 strays, so that it needs other
    memory. Whether it could keep the pages depends on who looks first, so it is done several times."""
    scene = _Scene(rank, timeout=10.0, **options)
    for number in range(4):
        scene.step(number)
    for number in range(4, 7):
        torch.accelerator.synchronize()  # so that pages come as soon as they are asked for
        halves = []
        if rank == 0:
            with torch.no_grad():
                halves = [param * 0.5 for param in scene.model.parameters()]
        else:
            float(scene.embedded(7))
        dist.barrier()
        if rank == 0:
            scene.values.append(scene.embedded(7))
            time.sleep(0.25)  # until nobody has the page any more
            scene.values.append(scene.loss(7, path=[2, 1]).detach())
        dist.barrier()
        scene.values += [half.piece for half in halves]  # type: ignore[attr-defined]
        scene.step(number)
    return scene.seen()


def pipeline(rank: int, *, schedule: str, case: str) -> list[Tensor]:
    """Three steps of a pipeline, each on top of those before."""
    where = device.of_rank(rank)
    torch.manual_seed(0)
    what = CASES[case]
    pipe = pipeline_of(what, what.blocks(), where, schedule)
    losses = [pipeline_step(pipe, what.data(), where) for _ in range(3)]
    grads = [param.grad for param in pipe.parameters() if param.grad is not None]
    return [each.detach().cpu() for each in (*losses, *grads)]


class Scene(NamedTuple):
    run: Callable[..., list[Tensor]]
    options: dict[str, Any]  # of `run`, and so of `shard()`
    mode: str = "lazy"  # in which the device runs


# Sums do not go straight to where they belong, and what is there is no memory of the user's stream.
BF16_ON_HOST = {"transport": "collective", "offload": "optimizer", "precision": "bf16"}
SCENES: dict[str, Scene] = {
    "collective": Scene(steps, {"transport": "collective", "exact": True}),
    "collective, backend's order": Scene(steps, {"transport": "collective", "exact": False}),
    "one-sided": Scene(steps, {"transport": "one-sided", "exact": True}),
    "gradients changed, one-sided": Scene(changed, {"transport": "one-sided", "exact": True}),
    "norms": Scene(clipped, {"transport": "collective"}),
    "norms, one-sided": Scene(clipped, {"transport": "one-sided", "exact": True}),
    "no overlap": Scene(two_streams, {"transport": "collective", "overlap": False}),
    "no overlap, one-sided": Scene(two_streams, {"transport": "one-sided", "exact": True, "overlap": False}),
    "two streams": Scene(two_streams, {"transport": "collective", "exact": True}),
    "two streams, one-sided": Scene(two_streams, {"transport": "one-sided", "exact": True}),
    "window": Scene(window, {"transport": "collective", "stage": 2}),
    "edits": Scene(edits, {"transport": "collective"}),
    "edits of what is held": Scene(held_then_edited, {"transport": "collective"}),
    "edits, one-sided": Scene(edits, {"transport": "one-sided", "exact": True}),
    "given up": Scene(given_up, {"transport": "collective", "exact": True}),
    "given up, one-sided": Scene(given_up, {"transport": "one-sided", "exact": True}),
    "masters": Scene(masters, {"transport": "one-sided", "exact": True}),
    "offload of the optimizer": Scene(steps, {"transport": "collective", "offload": "optimizer"}),
    "offload of parameters": Scene(steps, {"transport": "collective", "offload": "parameters"}),
    "offload, one-sided": Scene(edits, {"transport": "one-sided", "exact": True, "offload": "optimizer"}),
    "offload, two backwards": Scene(twice, {"transport": "collective", "offload": "optimizer"}),
    "captured": Scene(captured, {"transport": "one-sided", "exact": True}),
    "offload, evaluated and edited": Scene(evaluated_then_edited, {"transport": "collective", "offload": "optimizer"}),
    "offload, work before a step": Scene(worked_before_a_step, {"stage": 1} | BF16_ON_HOST),
    "offload, given up on another way": Scene(given_up_on_another_way, {"stage": 2, "exact": False} | BF16_ON_HOST),
    "pipeline": Scene(pipeline, {"schedule": "zb-h1", "case": "transformer"}),
    "pipeline, a tie with gradients on one rank": Scene(pipeline, {"schedule": "1f1b", "case": "tied, transposed"}),
    "pipeline, a tie": Scene(pipeline, {"schedule": "1f1b", "case": "tied at both ends"}),
    "replicas": Scene(steps, {"replicas": 2, "transport": "collective", "exact": True}),
    "replicas, backend's order": Scene(steps, {"replicas": 2, "transport": "collective", "exact": False}),
    "replicas, one-sided": Scene(steps, {"replicas": 2, "transport": "one-sided", "exact": True}),
    "replicas, given up": Scene(given_up, {"replicas": 2, "transport": "collective", "exact": True}),
    # Those that take seconds: a site is shown by the first scene that shows it.
    "stray": Scene(stray, {"transport": "collective", "exact": True}),
    "stray in a replica": Scene(stray, {"replicas": 2, "transport": "collective", "exact": True}),
    "other order, stage 2": Scene(other_order, {"transport": "collective", "exact": True, "stage": 2}),
    "behind": Scene(behind, {"transport": "collective", "exact": True}, "sides"),
    "behind, stage 2": Scene(behind, {"transport": "collective", "exact": True, "stage": 2}),
    "one backward fewer": Scene(one_backward_fewer, {"transport": "collective", "exact": False}),
    "stray, backend's order": Scene(stray, {"transport": "collective", "exact": False}),
    "stray in a replica, backend's order": Scene(stray, {"replicas": 2, "transport": "collective", "exact": False}),
}
