"""A limit on what waits between I and W: microbatches beyond it are computed again in W, with the same gradients."""

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from benchmarks.stage_blocks import BATCH, TOKENS, WIDTH, stage
from retrograde.pipeline.again import Pending, Surroundings
from retrograde.pipeline.payload import Payload
from retrograde.pipeline.stage import Stage, WeightedTarget
from tests.harness import Ranks
from tests.pipeline.bytes_of_blocks import BLOCKS, PAIRS, TOKEN_WISE
from tests.pipeline.cases import CASES, backward_order, compare, plain_step
from tests.pipeline.halves import Apply

MICROBATCHES = 3
NAMES = (
    "transformer",
    "checkpoint",
    "trees",
    "block called twice",
    "autocast",
    "first blocks frozen",
    "tied at both ends",
)


def batch() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH)


def play(module: nn.Module, limit: float | None, inputs: list[Tensor], grads: list[Tensor]) -> tuple[Stage, list[Any]]:
    """Every F, every I; the stage before its W, and the gradients of the inputs."""
    one = Stage(0, module, split=range(len(inputs)), pending=Pending(limit))
    for number, x in enumerate(inputs):
        one.forward(number, Payload.of(x.detach().requires_grad_()).apart(), {})
    found = [one.backward_inputs(number, [grad])[0] for number, grad in enumerate(grads)]
    return one, found


def dropouts() -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*parts)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS), nn.Linear(WIDTH, WIDTH))


class LayerDrop(nn.Module):
    """Leaves out layers at random, by Python's generator or NumPy's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.draw() < 0.5:
                x = layer(x)
        return x


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return self.a(self.a(x))


class Same(torch.autograd.Function):
    """A Function of the user, which the mode does not see."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def slope(m: Any, x: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(m.a(x).tanh().sum(), x, create_graph=True)
    return m.b(m.a(x)) + found


def used_unseen(use: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A stage with a weight `a` that waits in one use and has another one, of which its part is added in I."""
    torch.manual_seed(0)
    parts = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    return Apply(lambda m, x: m.b(m.a(x)) + use(m, x), a=parts[0], b=parts[1])


def compiled_twice() -> nn.Module:
    """In one graph the weight is tapped once, and used as a view once."""
    torch._dynamo.reset()
    block = used_unseen(lambda m, x: x @ m.a.weight.t())
    block.compile(backend="aot_eager")
    return nn.Sequential(block)


MODULES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "plain": (stage, True),
    "checkpoint": (lambda: stage("plain", "other"), True),
    "reentrant checkpoint": (lambda: stage("plain", "reentrant"), False),
    "dropout": (dropouts, True),
    "layers left out by Python": (lambda: LayerDrop(random.random), True),
    "layers left out by NumPy": (lambda: LayerDrop(np.random.rand), True),
    "batch norm": (normed, False),
    "in place": (InPlace, False),
    "a Function of the user": (lambda: used_unseen(lambda m, x: x * Same.apply(m.a.weight).sum(0)), True),
    "a Function of the user, checkpoint": (
        lambda: used_unseen(
            lambda m, x: checkpoint(lambda x: m.a(x) * Same.apply(m.a.weight).sum(0), x, use_reentrant=False)
        ),
        True,
    ),
    "vmap": (lambda: used_unseen(lambda m, x: torch.func.vmap(lambda row: row @ m.a.weight)(x)), True),
    "hook of a view": (lambda: used_unseen(through_a_hook), True),
    "gradient penalty": (lambda: used_unseen(slope), True),
    "compiled": (compiled_twice, True),
}


@pytest.mark.filterwarnings("ignore")  # Dynamo uses what torch deprecates
@pytest.mark.parametrize("name", MODULES)
def test_the_same_gradients(name: str) -> None:
    make, repeated = MODULES[name]
    inputs, grads = [batch() for _ in range(MICROBATCHES)], [batch() for _ in range(MICROBATCHES)]
    found = []
    for limit in (math.inf, 0):
        module = make()
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        one, input_grads = play(module, limit, [x.clone() for x in inputs], grads)
        assert [flight.repeat is not None for flight in one.flights.values()] == [
            limit == 0 and repeated
        ] * MICROBATCHES
        for number in range(MICROBATCHES):
            one.backward_weights(number)
        assert one.pending.held == 0 and not one.flights
        weight_grads = [torch.zeros(0) if p.grad is None else p.grad for p in module.parameters()]
        drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(())])
        found.append([*input_grads, *weight_grads, *module.buffers(), drawn])
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, masks: list[Tensor]) -> Tensor:
        masks[0].mul_(2)
        return self.b(self.a(x) * masks[0])


@pytest.mark.parametrize("where", ["option", "target"])
def test_a_stage_that_changes_what_it_is_given_keeps_its_pairs(where: str) -> None:
    """Rule 3, for keyword arguments and targets."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y * target.add_(1)).sum()

    module = Masked() if where == "option" else stage()
    one = Stage(0, module, loss if where == "target" else None, split={0}, pending=Pending(0))
    arrived = Payload.of(batch().requires_grad_()).apart()
    if where == "option":
        one.forward(0, arrived, {"masks": [torch.ones(WIDTH)]})
    else:
        one.forward_last(0, arrived, {}, WeightedTarget(batch(), 1.0))
    one.backward_inputs(0, [batch()])
    assert one.flights[0].repeat is None and one.flights[0].held > 0


def test_as_many_pairs_as_there_is_room_for() -> None:
    """What the pairs of one microbatch take is derived from the shapes; the first two fit."""
    module = stage()
    one, _ = play(module, 2 * BLOCKS * PAIRS, [batch() for _ in range(3)], [batch() for _ in range(3)])
    assert [flight.repeat is not None for flight in one.flights.values()] == [False, False, True]
    assert one.pending.held == 2 * BLOCKS * PAIRS
    again = one.flights[2].repeat
    assert again is not None and again.bytes == 2 * TOKEN_WISE  # its input, and the gradient of its output
    one.backward_weights(0)
    assert one.pending.held == BLOCKS * PAIRS


def test_parts_of_a_tensor_that_is_there_anyway_count_as_parts() -> None:
    """Microbatches are slices of the caller's batch, in a storage that none of them holds alone: three have room, and
    with the storages counted there would be room for none."""
    whole = batch().repeat(MICROBATCHES, 1, 1)
    one = Stage(0, nn.Linear(WIDTH, WIDTH), split=range(MICROBATCHES), pending=Pending(3 * 2 * TOKEN_WISE))
    for number, x in enumerate(whole.chunk(MICROBATCHES)):
        one.forward(number, Payload.of(x.requires_grad_()).apart(), {})
        one.backward_inputs(number, [batch()])
    assert [flight.held for flight in one.flights.values()] == [2 * TOKEN_WISE] * MICROBATCHES
    assert whole.shape[0] == MICROBATCHES * BATCH  # alive


def test_views_that_overlap_count_once() -> None:
    """Two uses of an expanded row and of what it was expanded from: no more than their storage."""
    one = Stage(0, Apply(lambda m, x: m.a(x.expand(4, -1, -1)) + m.a(x), a=nn.Linear(WIDTH, WIDTH)), split={0})
    one.forward(0, Payload.of(torch.randn(1, TOKENS, WIDTH).requires_grad_()).apart(), {})
    one.backward_inputs(0, [torch.randn(4, TOKENS, WIDTH)])
    x, grads = TOKEN_WISE // BATCH, (4 + 1) * (TOKEN_WISE // BATCH)
    assert one.flights[0].held == x + grads


CHECKPOINTS = {None: [False] * MICROBATCHES, "other": [False, True, True], "reentrant": [False] * MICROBATCHES}


@pytest.mark.parametrize("recompute", CHECKPOINTS)
def test_without_a_limit_one_checkpointed_microbatch_has_pairs(recompute: str | None) -> None:
    one, _ = play(stage("plain", recompute), None, [batch() for _ in range(3)], [batch() for _ in range(3)])
    assert [flight.repeat is not None for flight in one.flights.values()] == CHECKPOINTS[recompute]
    one.backward_weights(0)
    assert one.pending.held == sum(flight.held for flight in one.flights.values())


class Switched(nn.Module):
    """Checkpoints that are switched on and off."""

    def __init__(self) -> None:
        super().__init__()
        self.block = stage()
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.on else self.block(x)


def test_what_may_be_computed_again_is_known_from_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 4: how many microbatches of a step F prepares for it, and how many W computes again."""
    module = Switched()
    theirs = copy.deepcopy(module)
    prepared: list[torch.device] = []
    now = Surroundings.now
    monkeypatch.setattr(Surroundings, "now", lambda device: prepared.append(device) or now(device))
    one = Stage(0, module, split=range(MICROBATCHES))
    found = []
    for on in (False, False, True, True, False, False):
        module.on = theirs.on = on
        inputs, grads = [batch() for _ in range(MICROBATCHES)], [batch() for _ in range(MICROBATCHES)]
        for number, x in enumerate(inputs):
            one.forward(number, Payload.of(x.detach().requires_grad_()).apart(), {})
        for number, grad in enumerate(grads):
            one.backward_inputs(number, [grad])
        found.append((len(prepared), sum(flight.repeat is not None for flight in one.flights.values())))
        prepared.clear()
        for number, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
            one.backward_weights(number)
            theirs(x).backward(grad)
    assert found == [(3, 0), (0, 0), (0, 0), (3, 2), (3, 0), (0, 0)]
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), theirs.parameters(), strict=True))


def steps(rank: int, world: int, schedule: str) -> list[str]:
    wrong = []
    for name in NAMES:
        case = CASES[name]
        torch.manual_seed(0)
        blocks = case.blocks()
        pipe = rg.Pipeline(copy.deepcopy(blocks), schedule=schedule, microbatches=4, loss=case.loss, pending="1KiB")
        data = case.data()
        plain_step(blocks, data, case.loss, backward_order(pipe.schedule), case.around)
        with case.around():
            pipe.step(*copy.deepcopy(data.args), target=data.target)
        wrong += compare(name, pipe, blocks, case)
    return wrong


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_between_ranks(ranks: Ranks, schedule: str) -> None:
    assert ranks(2).run(steps, schedule) == [[], []]


def through_a_hook(m: Any, x: Tensor) -> Tensor:
    part = m.a.weight[: WIDTH // 2]
    part.register_hook(lambda grad: grad * 2)
    return x * F.linear(x, part).sum(-1, keepdim=True)


def sharded_and_unseen(rank: int, world: int) -> bool:
    """Do weights that a Function of the user has too get the same gradients from repeats and from pairs?"""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    found = []
    for pending in ("0B", math.inf):
        uses = [through_a_hook, lambda m, x: x * Same.apply(m.a.weight).sum(0)] * 2
        blocks = [used_unseen(use) for use in uses]
        pipe = rg.Pipeline(
            blocks,
            schedule="zb-h1",
            microbatches=4,
            loss=F.mse_loss,
            mesh=mesh["pp"],
            zero=rg.Zero(stage=3, mesh=mesh["dp"]),
            pending=pending,
        )
        torch.manual_seed(rank)
        pipe.step(torch.randn(8, WIDTH), target=torch.randn(8, WIDTH))
        found.append([pipe.engine.full_grad(p) for p in pipe.parameters()])
    return len(found[0]) > 0 and all(map(torch.equal, *found))


def test_sharded_weights_with_uses_that_no_mode_sees(ranks: Ranks) -> None:
    assert all(ranks(4).run(sharded_and_unseen))


def refused(rank: int, world: int) -> str:
    with pytest.raises(rg.RetrogradeError) as error:
        rg.Pipeline([nn.Linear(2, 2)] * 2, schedule="zb-h1", microbatches=2, loss=F.mse_loss, pending="much")
    return str(error.value)


def test_a_limit_that_is_no_size(ranks: Ranks) -> None:
    assert all("pending" in text for text in ranks(2).run(refused))
