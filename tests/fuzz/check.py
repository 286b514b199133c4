"""Run a case on ranks and compare it with plain torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor

import retrograde as rg
from retrograde.gradients import bucket
from retrograde.transport.collective import CollectiveTransport
from tests.fuzz import oracle
from tests.fuzz.models import build, units_of
from tests.fuzz.oracle import step_in_backward
from tests.fuzz.play import TOGETHER, Player, install_hooks, nothing, sgd
from tests.fuzz.recipes import PLAIN, Act, Phase, Recipe
from tests.fuzz.touches import Toucher
from tests.fuzz.traces import Reduced, Trace, copies, differences, miscounted
from tests.harness import RankError, Ranks, RankTimeout
from tests.meshes import mesh_of
from tests.thresholds import kept
from tests.transport.delays import delayed
from tests.transport.hosts import over_connections

TIMEOUT = 5.0  # of the engine, so that a hang becomes an error that says where


class EngineSide:
    """The sharded model on one rank."""

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.rank, self.model = rank, build(recipe)
        reduce = "sum" if oracle.divisor(recipe) == 1 else "mean"
        self.engine = rg.shard(
            self.model,
            recipe.stage,
            units=units_of(recipe),  # type: ignore[arg-type]
            prefetch=recipe.prefetch,
            resident=recipe.resident,
            reduce=reduce,
            mesh=mesh_of(recipe.replicas, recipe.world),
            transport=transport_of(recipe),
            precision=recipe.dtypes,
            whole=recipe.whole,
            timeout=TIMEOUT,
        )
        self.engine.gradient_divisor = recipe.parts
        self.records: list[tuple[str, Tensor]] = []
        self.faults: list[str] = []
        install_hooks(recipe, self.model)
        if recipe.in_backward:
            for param in [p for p in self.model.parameters() if p.requires_grad]:
                param.register_post_accumulate_grad_hook(step_in_backward)  # type: ignore[arg-type]

    def window(self, phase: Phase) -> AbstractContextManager[Any]:
        if phase.window is None:
            return nothing()
        return self.engine.coalesce(phase.budget) if phase.window == "coalesce" else self.engine.no_sync()

    def assign(self, grads: dict[str, Tensor]) -> None:
        params = dict(self.model.named_parameters())
        for name, grad in grads.items():
            params[name].grad = grad

    @contextlib.contextmanager
    def backward(self, act: Act) -> Iterator[None]:
        """A backward leaves no page that was not there before, and fetches none twice in a row: unless it recomputes,
        for which nobody knows what it needs, or a guess was wrong."""
        before, start = self._pages(), len(self.engine.ledger.entries)
        yield
        self.faults += [f"page of {name} left by a backward" for name in sorted(self._pages() - before)]
        events = list(self.engine.ledger.entries)[start:]
        fetched = [event.unit for event in events if event.kind == "gather"]
        if act.remat != PLAIN or self.engine.policy.prefetch:
            return
        again = [one for one, other in itertools.pairwise(fetched) if one == other]
        self.faults += [f"page of {name} fetched twice in a row" for name in again]

    def record(self, name: str, value: Tensor) -> None:
        self.records.append((name, value.detach().clone()))

    def _pages(self) -> set[str]:
        if self.engine.policy.resident:
            return set()  # they may stay
        return {unit.name for unit in self.engine.units if unit.page.ready and not unit.stays}

    def reductions(self) -> dict[str, Reduced]:
        ledger = self.engine.ledger
        return {
            unit.name: Reduced(ledger.count("reduce", unit.name), [slot.name for slot in unit.layout.slots])
            for unit in self.engine.units
        }

    def check_gathers(self) -> None:
        """Where pages stay, they come once until the weights change."""
        if self.engine.policy.keeps_pages:
            often = [unit.name for unit in self.engine.units if self.engine.ledger.count("gather", unit.name) > 1]
            self.faults += [f"page of {name} fetched again though it stays" for name in often]

    def check_step(self) -> None:
        """After a step nothing of what came before it is left."""
        flow, transport = self.engine.flow, self.engine.transport
        host = transport._host if isinstance(transport, CollectiveTransport) else transport
        kept = [*host._parts, *(transport._courtesies._parts if host is not transport else ())]
        left = {
            "pages": self._pages(),
            "pending gradients": self.engine.pending.gradients,
            "backwards": flow._backwards.running,
            "launches": flow._backwards.orphans,
            "parts of gradients": [key for key, _ in kept if key.meeting < transport.meetings],
        }
        self.faults += [f"{what} left after a step: {list(found)}" for what, found in left.items() if found]
        held = self.engine.ledger.resident
        if not self.engine.policy.keeps_pages and held > self.engine.policy.resident + self._two_pages():
            self.faults.append(f"{held} bytes of pages after a step")

    def _two_pages(self) -> int:
        return sum(sorted((unit.layout.page_bytes for unit in self.engine.units), reverse=True)[:2])


def transport_of(recipe: Recipe) -> str:
    """By collectives go half of the programs, whether ranks do the same or stray."""
    return "collective" if recipe.seed % 2 else "one-sided"


def play(recipe: Recipe, rank: int) -> Trace:
    side = EngineSide(recipe, rank)
    player, optimizer, toucher = Player(recipe, side), sgd(side.model, recipe), Toucher(side.model)
    grads, reductions = [], []
    for phase in recipe.phases:
        side.engine.ledger.clear()
        player.phase(phase)
        if not recipe.in_backward:
            side.check_gathers()
        if phase.raises:
            TOGETHER["zero"](recipe, side.model, optimizer)
        grads.append(copies(side.engine.full_grads()))
        reductions.append(side.reductions())
        for seen in map(toucher.touch, phase.touches):
            side.records += seen
        for name in phase.then:
            TOGETHER[name](recipe, side.model, optimizer)
            if name == "step":
                side.check_step()
    weights = copies(side.model.state_dict())
    dist.barrier()
    return Trace(grads, weights, side.records, side.faults, reductions=reductions)


def kept_from(recipe: Recipe) -> int:
    """Bytes from which on gradients wait where they are: in half of the programs all may."""
    return 1 if recipe.seed // 2 % 2 else bucket.LARGE


def _run(rank: int, world: int, recipes: Sequence[Recipe], delay: int | None) -> list[Trace]:
    traces = []
    for recipe in recipes:
        late = nothing() if delay is None else delayed(1000 * delay + recipe.seed + rank, chance=0.2)
        with late, kept(kept_from(recipe)), nothing() if recipe.seed % 3 else over_connections():
            traces.append(play(recipe, rank))
    return traces


class Checker:
    """Runs cases on pools of ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def check(self, recipe: Recipe, delay: int | None = None) -> list[str]:
        """What is wrong, if anything."""
        return self.check_all([recipe], delay)[0]

    def check_all(self, recipes: Sequence[Recipe], delay: int | None = None) -> list[list[str]]:
        """Of several recipes of the same world. If one of them raises, each is run by itself."""
        expected: list[list[Trace]] = []
        try:
            by_rank = self._ranks(recipes[0].world).run(
                _run,
                recipes,
                delay,
                timeout=3 * TIMEOUT + len(recipes),
                beside=lambda: expected.extend(map(oracle.play, recipes)),
            )
        except (RankError, RankTimeout) as error:
            if len(recipes) == 1:
                return [[str(error)]]
            return [self.check(recipe, delay) for recipe in recipes]
        triples = zip(recipes, zip(*by_rank, strict=True), expected, strict=True)
        return [_compare(recipe, got, want) for recipe, got, want in triples]


def _compare(recipe: Recipe, got: Sequence[Trace], want: Sequence[Trace]) -> list[str]:
    found = []
    for rank, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        wrong = differences(ours, theirs) + miscounted(recipe, ours, theirs)
        found += [f"rank {rank}: {each}" for each in wrong]
    return found
