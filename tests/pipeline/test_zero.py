"""Pipelines with ZeRO under them: gradients of two replicas, one reduction per unit and step."""

import contextlib
import copy
import itertools
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import retrograde as rg
from retrograde.pipeline import Action
from tests.harness import Pools, Ranks
from tests.pipeline.cases import CASES, SCHEDULES, Case, backward_order, reductions, replicas_step
from tests.reference import Grads
from tests.stages import EACH_STAGE, STAGES
from tests.thresholds import kept

MICROBATCHES = 4
NAMES = [name for name, case in CASES.items() if not case.compiled]
SHARE = 10  # of the cases, for each schedule and stage in the suite


def steps(rank: int, world: int, schedule: str, stage: int, names: list[str], pending: str | None = None) -> list[str]:
    """What is wrong after two steps of each case. A step is a window; at two of the stages all gradients may wait where
    they are, though these are small."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("pp", "dp"))
    wrong = []
    for name in names:
        case = CASES[name]
        if case.compiled:
            torch.compiler.reset()  # after a few versions of a function Dynamo would compile no other
        torch.manual_seed(0)
        blocks = case.blocks()
        pipe = rg.Pipeline(
            case.copies(blocks),
            schedule=schedule,
            microbatches=MICROBATCHES,
            loss=case.loss,
            mesh=mesh["pp"],
            zero=rg.Zero(stage=stage, mesh=mesh["dp"]),
            pending=pending,
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        plain = torch.optim.SGD(nn.ModuleList(blocks).parameters(), lr=0.1)
        for number in range(2):
            wanted = replicas_step(case, blocks, backward_order(pipe.schedule), 2, 10 * number)
            torch.manual_seed(10 * number + mesh["dp"].get_local_rank())
            data = case.data()
            pipe.engine.ledger.clear()
            with case.around(), kept(2**40 if stage == 2 else 1):
                pipe.step(*copy.deepcopy(data.args), target=data.target, **data.options)
            wrong += [f"{name}, step {number}: {text}" for text in compare(pipe, wanted, case)]
            wrong += [f"{name}, step {number}: {text}" for text in reductions(pipe)]
            optimizer.step()
            optimizer.zero_grad()
            for key, p in nn.ModuleList(blocks).named_parameters():
                p.grad = wanted.get(key)
            plain.step()
    return wrong


def compare(pipe: rg.Pipeline, wanted: Grads, case: Case) -> list[str]:
    """Bit for bit, but where plain torch adds the uses of a tied parameter in another order (cases.py)."""
    wrong = []
    for name, leaf in pipe.named_parameters():
        whole, reference = pipe.engine.full_grad(leaf), wanted.get(name)
        if (whole is None) != (reference is None):
            wrong.append(f"{name} has gradient {whole is not None}, torch {reference is not None}")
        elif whole is not None and not case.same(whole, reference):
            wrong.append(f"{name} differs by {(whole - reference).abs().max()}")
    return wrong


def transformer(world: int, schedule: str, gathered: int | None = None, pending: str | None = None) -> rg.Pipeline:
    torch.manual_seed(0)
    case = CASES["transformer"]
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("pp", "dp"))
    zero = rg.Zero(stage=3, mesh=mesh["dp"], gathered=gathered)
    return rg.Pipeline(
        case.blocks(),
        schedule=schedule,
        microbatches=4,
        loss=case.loss,
        mesh=mesh["pp"],
        zero=zero,
        pending=pending,
    )


def step(pipe: rg.Pipeline) -> None:
    torch.manual_seed(1)
    data = CASES["transformer"].data()
    pipe.step(*data.args, target=data.target)


def gathers_of(pipe: rg.Pipeline, told: Callable[[Action], None] = lambda action: None) -> dict[str, int]:
    """How many pages each kind of action of a step brought into memory."""
    found: dict[str, int] = {}
    seen = 0

    def watch(action: Action) -> None:
        nonlocal seen
        count = pipe.engine.ledger.count("gather")
        found[action.kind.value] = found.get(action.kind.value, 0) + count - seen
        seen = count
        told(action)

    pipe.watch(watch)
    step(pipe)
    return found


def gathers_by_kind(rank: int, world: int, schedule: str, gathered: int | None) -> tuple[dict[str, int], int]:
    """At stage 3; and how many units there are."""
    pipe = transformer(world, schedule, gathered)
    return gathers_of(pipe), len(pipe.engine.units)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_w_needs_no_weights(ranks: Ranks, schedule: str) -> None:
    for found, _ in ranks(4).run(gathers_by_kind, schedule, None):
        assert found["F"] > 0 and found["I"] > 0
        assert found["W"] == 0


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)])
def test_gathered_stages_are_gathered_once(ranks: Ranks, schedule: str, stages: int) -> None:
    for found, units in ranks(4).run(gathers_by_kind, schedule, stages):
        assert found.pop("GATHER") == units
        assert sum(found.values()) < stages  # where one stage is done before the other, it may be expected in vain


def failed_step(pipe: rg.Pipeline) -> list[str]:
    """A step in which every stage's forward raises."""

    def refuse(*args: object) -> None:
        raise RuntimeError("no")

    handles = [stage.module.register_forward_hook(refuse) for stage in pipe.stages.values()]
    pipe.watch(None)
    with pytest.raises(rg.PipelineError, match="no"):
        step(pipe)
    for handle in handles:
        handle.remove()
    return [f"stage {stage.index} holds pages of a failed step" for stage in pipe.stages.values() if stage.pages]


def pages_held(rank: int, world: int, schedule: str) -> list[str]:
    """With room for one stage, and again after a step that failed."""
    pipe, plain = transformer(world, schedule, gathered=1), transformer(world, schedule)
    gathered: set[int] = set()
    wrong = []

    def watch(action: Action) -> None:
        if action.kind.value == "GATHER":
            gathered.add(action.stage)
        elif action.kind.value == "DROP":
            gathered.discard(action.stage)
            leaves = pipe.stages[action.stage].module.parameters()
            wrong.extend(f"after {action}: the page of {leaf.unit.name}" for leaf in leaves if leaf.unit.page.ready)
        elif action.kind.value == "W" and action.stage not in gathered and pipe.stages[action.stage].pages:
            wrong.append(f"{action} finds pages")

    def both() -> None:
        pipe.watch(watch)
        step(pipe)
        step(plain)

    both()
    wrong += failed_step(pipe)
    both()
    for (name, mine), (_, other) in zip(pipe.named_parameters(), plain.named_parameters(), strict=True):
        if not torch.equal(pipe.engine.full_grad(mine), plain.engine.full_grad(other)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_dropped_stage_leaves_no_pages(ranks: Ranks, schedule: str) -> None:
    assert ranks(4).run(pages_held, schedule) == [[]] * 4


def some(schedule: str, stage: int) -> list[str]:
    """Every case with every stage, and every schedule with every stage; `python -m tests.pipeline.test_zero` runs all
    cases with all of them."""
    return NAMES[(len(SCHEDULES) * stage + SCHEDULES.index(schedule)) % SHARE :: SHARE]


@EACH_STAGE
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_by_two(ranks: Ranks, schedule: str, stage: int) -> None:
    found = ranks(4).run(steps, schedule, stage, some(schedule, stage), timeout=110)
    assert [text for by_rank in found for text in by_rank] == []


@pytest.mark.parametrize(
    ("schedule", "stage", "names"),
    [
        ("zb-v", 3, ["compiled, attention modules", "compiled, autocast"]),
        # It has B and I: a graph that is made in the middle of a step would look at gradients, and reduce them early.
        ("dualpipe-v", 1, ["compiled"]),
    ],
)
def test_compiled_regions(ranks: Ranks, schedule: str, stage: int, names: list[str]) -> None:
    """With other schedules and stages too in `python -m tests.pipeline.test_zero`: compiling takes seconds."""
    assert ranks(4).run(steps, schedule, stage, names, timeout=110) == [[]] * 4


@pytest.mark.parametrize(("schedule", "stage"), [("zb-h1", 3), ("zb-v", 1), ("dualpipe-v", 2)])
def test_a_limit_on_what_waits(ranks: Ranks, schedule: str, stage: int) -> None:
    """No pair has room: all microbatches that can be computed again in W are."""
    names = ["transformer", "checkpoint", "first blocks frozen", "partly frozen", "tied next to each other", "autocast"]
    found = ranks(4).run(steps, schedule, stage, names, "0", timeout=110)
    assert [text for by_rank in found for text in by_rank] == []


def pages_with_a_limit(rank: int, world: int) -> tuple[dict[str, int], list[str]]:
    """Gathers of each kind of action, and units whose page is there after a W."""
    pipe = transformer(world, "zb-h1", pending="0")
    left: list[str] = []

    def watch(action: Action) -> None:
        if action.kind.value == "W":
            left.extend(f"{action}: {unit.name}" for unit in pipe.engine.units if unit.page.ready)

    found = gathers_of(pipe, watch)
    return found, left


def test_w_gathers_what_it_computes_again_and_leaves_no_page(ranks: Ranks) -> None:
    for rank, (found, left) in enumerate(ranks(4).run(pages_with_a_limit)):
        assert (found["W"] > 0) == (rank >= 2)  # the first stage's input has no gradient, so it keeps its pairs
        assert left == []


def test_checkpoints_with_pages_that_come_early(ranks: Ranks) -> None:
    """With zb-h2 a page is to be dropped while it comes and a recompute is about to use it."""
    assert ranks(4).run(steps, "zb-h2", 3, ["checkpoint"], timeout=110) == [[]] * 4


def test_every_case_runs_with_every_stage() -> None:
    for stage in STAGES:
        assert {name for schedule in SCHEDULES for name in some(schedule, stage)} == set(NAMES)


def main(schedules: list[str]) -> int:
    """Every case with every stage, for the given schedules or all."""
    wrong = []
    with contextlib.closing(Pools()) as ranks:
        for schedule, stage in itertools.product(schedules or SCHEDULES, STAGES):
            found = ranks(4).run(steps, schedule, stage, list(CASES), timeout=600)
            texts = [text for by_rank in found for text in by_rank]
            print(f"{schedule}, ZeRO {stage}: {len(CASES)} cases, {len(texts)} differences", flush=True)
            wrong += texts
    print("\n".join(wrong))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
