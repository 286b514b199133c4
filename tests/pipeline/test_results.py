"""What a step gives back: sums and means of losses, the loss of each microbatch, gradients of what was given."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import retrograde as rg
from retrograde.pipeline.blocks import Chain
from tests.harness import Ranks
from tests.pipeline.cases import (
    CASES,
    SCHEDULES,
    WIDTH,
    Data,
    Fn,
    Scaled,
    backward_order,
    cut,
    in_place,
    lin,
    plain_backward,
    plain_losses,
    shares,
    tanhs,
    total,
)
from tests.reference import Grads, mean, same

MICROBATCHES = 4
ROWS = 11  # not a multiple of the microbatches
SHARES, ONES = shares(ROWS, MICROBATCHES), [1.0] * MICROBATCHES


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


def labelled_sum(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def losses_of(blocks: Sequence[nn.Module], x: Any, y: Any, loss: Callable[..., Tensor], **options: Any) -> list[Tensor]:
    return plain_losses(blocks, Data((x,), y, options), loss, MICROBATCHES)


def differing(pipe: rg.Pipeline, blocks: Sequence[nn.Module]) -> list[str]:
    whole = dict(nn.ModuleList(blocks).named_parameters())
    return [name for name, p in pipe.named_parameters() if not torch.equal(p.grad, whole[name].grad)]


def same_grad(found: Tensor, wanted: Tensor) -> bool:
    return found.grad is not None and wanted.grad is not None and torch.equal(found.grad, wanted.grad)


# ---- sums
def sums(rank: int, world: int, schedule: str) -> list[str]:
    """Two steps, the second on top of the first, against plain gradient accumulation."""
    wrong = []
    for name, loss in (("plain", summed), ("uneven microbatches", summed), ("transformer", labelled_sum)):
        torch.manual_seed(0)
        case = CASES[name]
        blocks = case.blocks()
        pipe = rg.Pipeline(
            copy.deepcopy(blocks), schedule=schedule, microbatches=MICROBATCHES, loss=loss, loss_reduction="sum"
        )
        for _ in range(2):
            data = case.data()
            losses = losses_of(blocks, data.args[0], data.target, loss)
            plain_backward(losses, ONES, backward_order(pipe.schedule))
            found = pipe.step(*data.args, target=data.target)
            if not torch.equal(found, total(losses, ONES)):
                wrong.append(f"{name}: the loss is {found}")
            wrong += [f"{name}: {text}" for text in differing(pipe, blocks)]
        evaluated = pipe.evaluate(*data.args, target=data.target).loss
        if not torch.equal(evaluated, found):
            wrong.append(f"{name}: evaluate gives {evaluated}")
    return wrong


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_that_is_a_sum(ranks: Ranks, schedule: str) -> None:
    assert ranks(2).run(sums, schedule) == [[], []]


def integers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


def whole_batches(rank: int, world: int, reduction: str) -> tuple[bool, list[str]]:
    """Small integers have exact sums in any order: the whole batch at once gives the same bits."""
    torch.manual_seed(0)
    blocks = [lin() for _ in range(4)]
    for block in blocks:
        block.weight.data = integers(WIDTH, WIDTH)
        block.bias.data = integers(WIDTH)
    x, y = integers(8, WIDTH), integers(8, WIDTH)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = (output * target).sum()
        return value if reduction == "sum" else value / len(output)

    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule="zb-h1", microbatches=4, loss=loss, loss_reduction=reduction)
    found = pipe.step(x, target=y)
    wanted = loss(Chain(blocks)(x), y)
    wanted.backward()
    return torch.equal(found, wanted.detach()), differing(pipe, blocks)


@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_the_whole_batch_at_once(ranks: Ranks, reduction: str) -> None:
    assert ranks(2).run(whole_batches, reduction) == [(True, []), (True, [])]


# ---- the loss of each microbatch
def losses_of_microbatches(rank: int, world: int, schedule: str, reduction: str) -> list[str]:
    torch.manual_seed(0)
    blocks = tanhs(8)
    loss = summed if reduction == "sum" else F.mse_loss
    pipe = rg.Pipeline(
        copy.deepcopy(blocks), schedule=schedule, microbatches=MICROBATCHES, loss=loss, loss_reduction=reduction
    )
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    wanted = losses_of(blocks, x, y, loss)
    results = {"run": pipe.run(x, target=y), "evaluate": pipe.evaluate(x, target=y), "no target": pipe.evaluate(x)}
    wrong = []
    for name, result in results.items():
        here = pipe.schedule.last_stage in pipe.stages and name != "no target"
        if len(result.losses) != (MICROBATCHES if here else 0):
            wrong.append(f"{name}: {len(result.losses)} losses")
        elif any(loss.requires_grad for loss in result.losses):
            wrong.append(f"{name}: losses with a graph")
        elif here and not all(map(torch.equal, result.losses, (value.detach() for value in wanted))):
            wrong.append(f"{name}: {result.losses} instead of {wanted}")
    if not torch.equal(results["run"].loss, total(wanted, ONES if reduction == "sum" else SHARES)):
        wrong.append("the total")
    return wrong


@pytest.mark.parametrize("reduction", ("mean", "sum"))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_of_microbatches(ranks: Ranks, schedule: str, reduction: str) -> None:
    assert ranks(2).run(losses_of_microbatches, schedule, reduction) == [[], []]


# ---- what each microbatch counts
class LossOfLabels(nn.Module):
    """The last block of a model that makes its own loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.a = lin()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(self.a(x), labels)


def given_as(labels: str, y: Tensor) -> dict[str, Any]:
    """What a step gets besides its inputs, none of which tells the last stage how many samples there are."""
    return {"keyword": {"labels": y}, "nothing": {}, "no rows": {"target": "zeros"}}[labels]


def labels_elsewhere(rank: int, world: int, schedule: str, labels: str) -> list[str]:
    """Microbatches of 3, 3, 3 and 2 rows; only the rank of the first stage has the inputs."""
    torch.manual_seed(0)
    losses: dict[str, nn.Module] = {
        "keyword": LossOfLabels(),
        "nothing": Fn(lambda m, x: m.a(x).square().mean(), a=lin()),
        "no rows": lin(),
    }
    blocks = [*tanhs(7), losses[labels]]
    loss = (lambda output, target: output.square().mean()) if labels == "no rows" else None
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule=schedule, microbatches=MICROBATCHES, loss=loss)
    x, given = torch.randn(ROWS, WIDTH), given_as(labels, torch.randn(ROWS, WIDTH))
    options = {name: value for name, value in given.items() if name != "target"}
    wanted = losses_of(blocks, x, given.get("target"), loss or (lambda output, target: output), **options)
    plain_backward(wanted, SHARES, backward_order(pipe.schedule))
    args = (x,) if 0 in pipe.stages else ()
    wrong = [] if torch.equal(pipe.step(*args, **given), total(wanted, SHARES)) else ["the loss"]
    if labels == "no rows" and not torch.equal(pipe.evaluate(*args, **given).loss, total(wanted, SHARES)):
        wrong.append("evaluate")
    return wrong + differing(pipe, blocks)


@pytest.mark.parametrize("labels", ("keyword", "nothing", "no rows"))
@pytest.mark.parametrize("schedule", ("1f1b", "zb-v", "interleaved-1f1b"))
def test_microbatches_count_by_samples_wherever_labels_are(ranks: Ranks, schedule: str, labels: str) -> None:
    assert ranks(2).run(labels_elsewhere, schedule, labels) == [[], []]


def odd_losses(rank: int, world: int) -> list[Tensor]:
    """A loss that is not a number is a loss, and all ranks see it; so is one in another precision."""
    found = []
    for dtype, factor in ((torch.float32, math.nan), (torch.float64, 1.0), (torch.bfloat16, 1.0)):
        blocks = [lin().to(dtype) for _ in range(2)]

        def loss(output: Tensor, target: Tensor, factor: float = factor) -> Tensor:
            return F.mse_loss(output, target) * factor

        pipe = rg.Pipeline(blocks, schedule="1f1b", microbatches=2, loss=loss)
        x = torch.ones(4, WIDTH, dtype=dtype)
        found.append(pipe.step(x, target=x))
    return found


def test_every_rank_has_the_loss_as_it_is(ranks: Ranks) -> None:
    first, second = ranks(2).run(odd_losses)
    assert [loss.dtype for loss in first] == [torch.float32, torch.float64, torch.bfloat16]
    assert [loss.dtype for loss in second] == [torch.float32, torch.float64, torch.bfloat16]
    assert math.isnan(first[0]) and math.isnan(second[0])
    assert torch.equal(first[1], second[1]) and torch.equal(first[2], second[2])


# ---- gradients of the input
def leaf_input(rank: int, world: int, schedule: str, name: str) -> list[str]:
    """Two steps that add up in `x.grad`, and in the parameters as they do without it."""
    torch.manual_seed(0)
    blocks = {"plain": tanhs(8), "frozen": [block.requires_grad_(False) for block in tanhs(8)], "in place": in_place()}[
        name
    ]
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule=schedule, microbatches=MICROBATCHES, loss=F.mse_loss)
    x, y = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    before, wanted = x.detach().clone(), x.detach().clone().requires_grad_()
    wrong = []
    for _ in range(2):
        if name == "in place":  # torch refuses to change a leaf, or a view of one
            blocks_and_copy = [Fn(lambda m, part: part.clone()), *blocks]
            losses = losses_of(blocks_and_copy, wanted, y, F.mse_loss)
        else:
            losses = losses_of(blocks, wanted, y, F.mse_loss)
        plain_backward(losses, SHARES, backward_order(pipe.schedule))
        with torch.no_grad():  # the caller's mode is not that of the step
            pipe.step(x, target=y)
        if 0 in pipe.stages and not same_grad(x, wanted):
            wrong.append(f"x.grad is {x.grad}, torch has {wanted.grad}")
        if 0 not in pipe.stages and x.grad is not None:
            wrong.append("x.grad on a rank without the first stage")
        if name != "frozen":
            wrong += differing(pipe, blocks)
    if not torch.equal(x.detach(), before):
        wrong.append("x was changed")
    if any(stage.flights for stage in pipe.stages.values()):
        wrong.append("something is left in flight")
    return wrong


@pytest.mark.parametrize("name", ("plain", "frozen", "in place"))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradient_of_a_leaf(ranks: Ranks, schedule: str, name: str) -> None:
    assert ranks(2).run(leaf_input, schedule, name) == [[], []]


def memory_order(rank: int, world: int) -> bool:
    """A leaf whose rows are not together in memory: kernels see it as torch's do."""
    torch.manual_seed(0)
    blocks = tanhs(4)
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule="zb-h1", microbatches=MICROBATCHES, loss=F.mse_loss)
    x, y = torch.randn(WIDTH, ROWS).t().requires_grad_(), torch.randn(ROWS, WIDTH)
    wanted = x.detach().requires_grad_()
    plain_backward(losses_of(blocks, wanted, y, F.mse_loss), SHARES, backward_order(pipe.schedule))
    pipe.step(x, target=y)
    return not differing(pipe, blocks) and (0 not in pipe.stages or same_grad(x, wanted))


def test_gradient_of_a_leaf_in_another_memory_order(ranks: Ranks) -> None:
    assert ranks(2).run(memory_order) == [True, True]


def continued(rank: int, world: int, schedule: str) -> list[str]:
    """The input has a graph: backward goes on into it, once."""
    torch.manual_seed(0)
    blocks, front = tanhs(8), nn.Sequential(lin(), nn.Tanh(), lin())
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule=schedule, microbatches=MICROBATCHES, loss=F.mse_loss)
    twin = copy.deepcopy(front)
    z, y = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    wanted = z.detach().clone().requires_grad_()
    losses = losses_of(blocks, front(wanted), y, F.mse_loss)
    torch.autograd.backward([loss * share for loss, share in zip(losses, SHARES, strict=True)])
    calls: list[Tensor] = []
    given = twin(z)
    given.register_hook(calls.append)
    pipe.step(given, target=y)
    if 0 not in pipe.stages:
        return [name for name, p in twin.named_parameters() if p.grad is not None]
    wrong = [name for name, p in front.named_parameters() if not same_grad(twin.get_parameter(name), p)]
    if not same_grad(z, wanted):
        wrong.append("z")
    if len(calls) != 1:
        wrong.append(f"backward went {len(calls)} times through the caller's graph")
    try:
        given.sum().backward()
        wrong.append("the caller's graph was not freed")
    except RuntimeError as error:
        if "second time" not in str(error):
            wrong.append(str(error))
    return wrong


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_go_on_into_the_callers_graph(ranks: Ranks, schedule: str) -> None:
    assert ranks(2).run(continued, schedule) == [[], []]


def trees(rank: int, world: int) -> bool:
    """A dictionary with a leaf, a tensor without gradient and a constant; and leaves of one microbatch each."""
    torch.manual_seed(0)
    first = Fn(lambda m, t: m.a(t["x"]) * t["by"] + t["row"], a=lin())
    blocks = [first, *tanhs(3)]
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule="zb-h1", microbatches=MICROBATCHES, loss=F.mse_loss)
    row, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    x, wanted = (torch.ones(ROWS, WIDTH).requires_grad_() for _ in range(2))
    parts, wanted_parts = ([part.clone().requires_grad_() for part in cut(row, MICROBATCHES)] for _ in range(2))
    rows, targets = cut(row, MICROBATCHES), cut(y, MICROBATCHES)
    for own in (cut(wanted, MICROBATCHES), wanted_parts):
        inputs = [{"x": part, "by": 2, "row": r} for part, r in zip(own, rows, strict=True)]
        losses = [F.mse_loss(Chain(blocks)(a), b) for a, b in zip(inputs, targets, strict=True)]
        plain_backward(losses, SHARES, backward_order(pipe.schedule))
    pipe.step({"x": x, "by": 2, "row": row}, target=y)
    given = [{"x": part, "by": 2, "row": r} for part, r in zip(parts, rows, strict=True)]
    pipe.step(rg.Microbatches(given), target=y)
    pairs = [(x, wanted), *zip(parts, wanted_parts, strict=True)]
    if 0 not in pipe.stages:
        return all(found.grad is None for found, _ in pairs)
    return all(same_grad(found, other) for found, other in pairs) and row.grad is None


def test_gradients_in_trees_and_of_microbatches(ranks: Ranks) -> None:
    assert ranks(2).run(trees) == [True, True]


def microbatches_in_place(rank: int, world: int) -> bool:
    """A block changes its input in place: leaves that the caller gave keep their values."""
    torch.manual_seed(0)
    blocks = in_place()[:4]
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule="zb-h1", microbatches=MICROBATCHES, loss=F.mse_loss)
    row, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    parts, wanted = ([part.clone().requires_grad_() for part in cut(row, MICROBATCHES)] for _ in range(2))
    targets = cut(y, MICROBATCHES)
    losses = [F.mse_loss(Chain(blocks)(part.clone()), b) for part, b in zip(wanted, targets, strict=True)]
    plain_backward(losses, SHARES, backward_order(pipe.schedule))
    pipe.step(rg.Microbatches(parts), target=y)
    if not torch.equal(torch.cat(parts), row):
        return False
    return 0 not in pipe.stages or all(map(same_grad, parts, wanted))


def test_microbatches_that_a_block_changes_in_place(ranks: Ranks) -> None:
    assert ranks(2).run(microbatches_in_place) == [True, True]


def targets_and_options(rank: int, world: int, schedule: str, graph: bool) -> list[str]:
    """`mask` is used by the last block alone, so its gradient is on that block's rank, as the target's is."""
    torch.manual_seed(0)
    blocks = [*tanhs(7), Scaled()]
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule=schedule, microbatches=MICROBATCHES, loss=F.mse_loss)
    x = torch.randn(ROWS, WIDTH)
    y, mask = torch.randn(ROWS, WIDTH).requires_grad_(), torch.rand(ROWS).requires_grad_()
    plain_y, plain_mask = (t.detach().clone().requires_grad_() for t in (y, mask))

    def given(leaf: Tensor) -> Tensor:
        return leaf.exp() if graph else leaf

    losses = losses_of(blocks, x, given(plain_y), F.mse_loss, mask=given(plain_mask))
    torch.autograd.backward([loss * share for loss, share in zip(losses, SHARES, strict=True)])
    pipe.step(x, target=given(y), mask=given(mask))
    if pipe.schedule.last_stage not in pipe.stages:
        return ["a gradient on another rank"] if y.grad is not None or mask.grad is not None else []
    pairs = {"target": (y, plain_y), "mask": (mask, plain_mask)}
    return [name for name, (found, wanted) in pairs.items() if not same_grad(found, wanted)]


@pytest.mark.parametrize("graph", (False, True))
@pytest.mark.parametrize("schedule", ("1f1b", "zb-v"))
def test_gradients_of_targets_and_options(ranks: Ranks, schedule: str, graph: bool) -> None:
    assert ranks(2).run(targets_and_options, schedule, graph) == [[], []]


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.raises = lin(), False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            raise ValueError("as told")
        return self.a(x)


def failed(rank: int, world: int) -> tuple[str, bool, bool]:
    blocks = [*tanhs(3), Raising()]
    pipe = rg.Pipeline(blocks, schedule="1f1b", microbatches=MICROBATCHES, loss=F.mse_loss)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    blocks[-1].raises = True
    text = "nothing was raised"
    try:
        pipe.step(x, target=torch.randn(ROWS, WIDTH))
    except rg.PipelineError as error:
        text = str(error)
    nothing = x.grad is None
    blocks[-1].raises = False
    pipe.step(x, target=torch.randn(ROWS, WIDTH))
    return text, nothing, (x.grad is not None) == (0 in pipe.stages)


def test_a_failed_step_gives_no_gradient(ranks: Ranks) -> None:
    for text, nothing, then in ranks(2).run(failed):
        assert "ValueError: as told" in text and nothing and then


def replicated(rank: int, world: int, reduction: str) -> bool:
    """With ZeRO: the input's gradient is of this replica's own loss, as it is in DDP."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    blocks = tanhs(4)
    loss = summed if reduction == "sum" else F.mse_loss
    pipe = rg.Pipeline(
        copy.deepcopy(blocks),
        schedule="zb-h1",
        microbatches=MICROBATCHES,
        loss=loss,
        loss_reduction=reduction,
        mesh=mesh["pp"],
        zero=rg.Zero(stage=3, mesh=mesh["dp"], reduce=reduction),
    )
    weights = ONES if reduction == "sum" else SHARES
    by_replica: list[Grads] = []
    right = True
    for replica in range(2):
        torch.manual_seed(replica)
        x, y = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
        wanted, twin = x.detach().clone().requires_grad_(), nn.ModuleList(copy.deepcopy(blocks))
        losses = losses_of(list(twin), wanted, y, loss)
        plain_backward(losses, weights, backward_order(pipe.schedule))
        by_replica.append({name: p.grad for name, p in twin.named_parameters()})
        if replica == mesh["dp"].get_local_rank():
            right &= torch.equal(pipe.step(x, target=y), total(losses, weights))
            right &= same_grad(x, wanted) if 0 in pipe.stages else x.grad is None
    divisor = 1 if reduction == "sum" else 2
    found = {name: pipe.engine.full_grad(leaf) for name, leaf in pipe.named_parameters()}
    return right and all(
        same(grad, mean([grads[name] for grads in by_replica], divisor)) for name, grad in found.items()
    )


@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_replicas(ranks: Ranks, reduction: str) -> None:
    assert ranks(4).run(replicated, reduction) == [True] * 4
