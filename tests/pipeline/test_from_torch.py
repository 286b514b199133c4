"""What users of torch.distributed.pipelining bring along: stages they have cut, their words, their schedules as CSV."""

import copy
import csv
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.schedules import _Action, _validate_schedule

import retrograde as rg
from retrograde.errors import ScheduleError
from retrograde.pipeline import Schedule, check, generate, read_csv, write_csv
from tests.harness import Ranks
from tests.pipeline.cases import (
    SCHEDULES,
    WIDTH,
    Data,
    Scaled,
    backward_order,
    plain_backward,
    plain_losses,
    shares,
    tanhs,
)
from tests.stages import EACH_STAGE

COUNT = 4


def stages_of(rank: int, schedule: str, world: int, blocks: list[nn.Module]) -> dict[int, nn.Module]:
    """The user's own cut: as many blocks in each stage."""
    plan = generate(schedule, world, COUNT)
    each = len(blocks) // plan.stages
    return {n: nn.Sequential(*blocks[n * each : (n + 1) * each]) for n in plan.stages_of(rank)}


def own_stages(rank: int, world: int, schedule: str, scale_grads: bool) -> list[str]:
    torch.manual_seed(0)
    blocks = tanhs(8)
    x, y = torch.randn(11, WIDTH), torch.randn(11, WIDTH)
    mine = stages_of(rank, schedule, world, copy.deepcopy(blocks))
    pipe = rg.Pipeline.from_stage_modules(
        mine, schedule=schedule, microbatches=COUNT, loss=F.mse_loss, scale_grads=scale_grads
    )
    result = pipe.run(x, target=y)
    losses = plain_losses(blocks, Data((x,), y), F.mse_loss, COUNT)
    weights = shares(11, COUNT) if scale_grads else [1.0] * COUNT
    plain_backward(losses, weights, backward_order(pipe.schedule))
    each = 8 // pipe.schedule.stages
    wrong = []
    for number, module in mine.items():
        for place, block in enumerate(module):
            pairs = zip(block.named_parameters(), blocks[number * each + place].parameters(), strict=True)
            wrong += [f"{number}.{place}.{name}" for (name, a), b in pairs if not torch.equal(a.grad, b.grad)]
    if pipe.schedule.last_stage in pipe.stages:
        whole = nn.Sequential(*blocks)
        expected = torch.cat([whole(part) for part in x.tensor_split(COUNT)])
        if not torch.equal(result.output, expected):
            wrong.append("the merged output")
    elif result.output is not None:
        wrong.append("an output on a rank without the last stage")
    if set(dict(pipe.named_parameters())) != {f"{n}.{k}" for n, m in mine.items() for k, _ in m.named_parameters()}:
        wrong.append(f"names: {list(dict(pipe.named_parameters()))}")
    return wrong


@pytest.mark.parametrize(("schedule", "scale_grads"), [("1f1b", True), ("zb-v", True), ("zb-h1", False)])
def test_stages_of_the_user(ranks: Ranks, schedule: str, scale_grads: bool) -> None:
    assert ranks(2).run(own_stages, schedule, scale_grads) == [[], []]


class TwoScaled(nn.Module):
    """A stage with keyword arguments of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Scaled()
        self.b = Scaled()

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return self.b(self.a(x, mask, scale), mask)


def sharded_stages(rank: int, world: int, stage: int) -> list[str]:
    """Replicas have the same batch, so that the mean over them is the gradient of one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    whole: list[nn.Module] = [TwoScaled(), TwoScaled()]
    options = {"mask": torch.rand(8), "scale": 0.5}
    data = Data((torch.randn(8, WIDTH),), torch.randn(8, WIDTH), options)
    number = mesh["pp"].get_local_rank()
    pipe = rg.Pipeline.from_stage_modules(
        {number: copy.deepcopy(whole[number])},
        schedule="zb-h1",
        microbatches=COUNT,
        loss=F.mse_loss,
        mesh=mesh["pp"],
        zero=rg.Zero(stage=stage, mesh=mesh["dp"]),
        timeout=60,
    )
    pipe.step(*data.args, target=data.target, **data.options)
    losses = plain_losses(whole, data, F.mse_loss, COUNT)
    plain_backward(losses, shares(8, COUNT), backward_order(pipe.schedule))
    wanted = {f"{number}.{name}": p.grad for name, p in whole[number].named_parameters()}
    assert pipe.engine is not None
    found = {name: pipe.engine.full_grad(p) for name, p in pipe.named_parameters()}
    assert found.keys() == wanted.keys()
    return [name for name, grad in found.items() if not torch.equal(grad, wanted[name])]


@EACH_STAGE
def test_stages_of_the_user_sharded_and_with_keyword_arguments(ranks: Ranks, stage: int) -> None:
    assert ranks(4).run(sharded_stages, stage, timeout=60) == [[], [], [], []]


def unknown_options(rank: int, world: int) -> tuple[str, bool, bool]:
    """Rank 0's stage takes `mask` and `scale`, rank 1's no keyword arguments but `input`."""
    torch.manual_seed(0)
    stage = TwoScaled() if rank == 0 else nn.Linear(WIDTH, WIDTH)
    pipe = rg.Pipeline.from_stage_modules({rank: stage}, schedule="1f1b", microbatches=2, loss=F.mse_loss)
    x, mask = torch.randn(4, WIDTH), torch.rand(4)
    with pytest.raises(rg.PipelineError) as error:
        pipe.step(x, target=x, mask=mask, scael=0.5)
    untouched = all(p.grad is None for p in pipe.parameters())
    pipe.step(x, target=x, mask=mask, scale=0.5)
    return str(error.value), untouched, all(p.grad is not None for p in pipe.parameters())


def test_keyword_arguments_that_no_stage_takes(ranks: Ranks) -> None:
    text = (
        "scael=0.5: no block accepts it; give target=... for the loss, or keyword arguments of the blocks' forward "
        "(input, mask, scale, x)"
    )
    lines = [f"rank {rank}: {text}" for rank in range(2)]
    assert ranks(2).run(unknown_options) == [("\n".join(lines), True, True)] * 2


def wrong_stages(rank: int, world: int) -> list[str]:
    """A mistake on rank 1 alone."""
    found = []
    for given in (
        {rank: nn.Linear(2, 2)} if rank == 0 else {0: nn.Linear(2, 2)},
        {rank: nn.Linear(2, 2) if rank == 0 else 3},
    ):
        with pytest.raises(rg.PipelineError) as error:
            rg.Pipeline.from_stage_modules(given, schedule="1f1b", microbatches=2, loss=F.mse_loss)
        found.append(str(error.value))
    return found


def test_wrong_stages_are_an_error_on_all_ranks(ranks: Ranks) -> None:
    for numbers, kind in ranks(2).run(wrong_stages):
        assert "stages=[0] are given, and the schedule has stages [1] on this rank" in numbers
        assert "stages[1]" in kind and "is not a module" in kind


def trees(rank: int, world: int) -> bool:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> dict[str, object]:
            y = self.a(x)
            return {"y": y, "sum": y.sum(), "kind": "two"}

    torch.manual_seed(0)
    x = torch.randn(4, WIDTH)

    def loss(out: dict[str, Tensor], target: Tensor) -> Tensor:
        return out["y"].mean()

    module = nn.Linear(WIDTH, WIDTH) if rank == 0 else Two()
    pipe = rg.Pipeline.from_stage_modules({rank: module}, schedule="1f1b", microbatches=2, loss=loss)
    result = pipe.run(x, target=x)
    if rank == 0:
        return result.output is None
    out = result.output
    return out["y"].shape == (4, WIDTH) and out["sum"].shape == (2,) and out["kind"] == "two"


def test_outputs_that_are_trees_are_merged(ranks: Ranks) -> None:
    assert ranks(2).run(trees) == [True, True]


# ---- CSV
@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_ours(name: str) -> None:
    """torch's own reader and its check accept what is written, and it reads back as the same schedule."""
    schedule = generate(name, 4, 8)
    text = write_csv(schedule)
    rows = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(io.StringIO(text)))}
    mapping = _validate_schedule(rows, 4, schedule.stages, 8)
    assert tuple(mapping[stage] for stage in range(schedule.stages)) == schedule.placement
    assert read_csv(text, name) == schedule


def test_torchs_file_is_read() -> None:
    """Idle cells, pairs that overlap, and what torch's lowering adds."""
    text = (
        "0UNSHARD,0F0,0SEND_F0,0F1,,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n,1RECV_F0,1F0,1I0,1W0,1F1,1B1,1F2,1B2,1REDUCE_GRAD\n"
    )
    schedule = read_csv(text)
    assert schedule == Schedule.parse(
        "schedule csv microbatches=3 placement=0,1\n"
        "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\n"
        "rank 1: 1F0 1I0 1W0 1F1 1B1 1F2 1B2\n"
    )
    check(schedule)


@pytest.mark.parametrize("end", ["\n", "\n\n", "\n,,\n", ""])
def test_lines_without_actions_at_the_end_are_no_ranks(end: str) -> None:
    schedule = read_csv("0F0,0B0\n,1F0,1B0" + end)
    check(schedule)
    assert schedule.placement == (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "row 0, column 1: '0X0' is not an action"),
        ("0F0,0B0\n0F1\n", "row 1: 0F1 is of stage 0, which rank 0 has"),
        ("0F0,2F0\n", "no action of stage 1"),
        ("\n", "no actions"),
    ],
)
def test_a_file_that_is_none(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        read_csv(text)
