"""A case of the matrix on plain torch: every rank's part on a copy of its own, put together by tests/reference.py."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from retrograde.layout import Precision
from tests.multiproc.precise import computing
from tests.patterns.context import NaturalContext
from tests.patterns.driver import build, optimizers, seed_phase, snapshot
from tests.patterns.models import Spec
from tests.patterns.registry import Case, ModelHook
from tests.patterns.trace import Trace
from tests.reference import Grads, PlainRanks, Recorder


class OracleContext(NaturalContext):
    """Plain torch, with the things that a replay must know of written down."""

    def __init__(self, spec: Spec, model: nn.Module, rank: int, world: int, recorder: Recorder) -> None:
        super().__init__(spec, model)
        self.rank, self.world = rank, world
        self.recorder = recorder

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.recorder.zero(set_to_none)

    def assign_grads(self, grads: dict[str, Tensor | None]) -> None:
        for name, grad in grads.items():
            self.recorder.assign(name, grad)

    def coalesce(self) -> AbstractContextManager[Any]:
        return self.recorder.window(joins_next=False)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.recorder.window(joins_next=True)


def _set_up(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    model = build(case)
    context = NaturalContext(case.spec, model)
    if case.setup is not None:
        case.setup(model, context)
    return model, context.memo


class Oracle:
    """Plays a case for all ranks of a world."""

    def __init__(self, case: Case, world: int, stage: int) -> None:
        self.case, self.world = case, world
        # The recorder needs the parameters that setup may add, and setup a context: so in two steps.
        models, memos = zip(*(_set_up(case) for _ in range(world)), strict=True)
        masters = None
        if case.precision is not None:
            masters, _ = _set_up(case)
            models = [computing(model, Precision.of(case.precision)) for model in models]
        self.ranks = PlainRanks(models, stage, case.leaf_hook, replicas=case.replicas(world), masters=masters)
        self.contexts: list[OracleContext] = []
        for rank, model in enumerate(models):
            self.contexts.append(OracleContext(case.spec, model, rank, world, self.ranks.recorders[rank]))
            self.contexts[rank].memo = memos[rank]
        self.optimizers = optimizers(case, self.ranks.trained)

    def play(self) -> list[Trace]:
        grads = []
        for step in range(self.case.steps):
            for context in self.contexts:
                context.step = step
            for index in range(len(self.case.phases)):
                grads.append(self._phase(step, index))
        traces = []
        for model, context in zip(self.ranks.models, self.contexts, strict=True):
            state = model if self.case.precision is None else self.ranks.trained
            traces.append(Trace(grads, snapshot(state.state_dict()), context.records, []))
        return traces

    def _phase(self, step: int, index: int) -> Grads:
        phase, trained = self.case.phases[index], self.ranks.trained
        self.ranks.begin()
        self._run(step, index)
        self.ranks.reduce()
        self._once(self.case.edit)
        if self.case.optimizer_steps:
            self.case.take_step(self.optimizers[phase.scope])
        grads = snapshot({name: p.grad for name, p in self.ranks.params.items()})
        # Once a run has diverged, everything is NaN on both sides and nothing is compared any more.
        assert all(g is None or g.isfinite().all() for g in grads.values()), f"{self.case.id} diverges"
        self._once(self.case.after)
        if not self.case.keep_grads:
            trained.zero_grad()
        self.ranks.follow(phase.scope)
        return grads

    def _once(self, hook: ModelHook | None) -> None:
        """For all ranks, which see what it records."""
        if hook is None:
            return
        first, *others = self.contexts
        known = len(first.records)
        hook(self.ranks.trained, first)
        for context in others:
            context.records += first.records[known:]

    def _run(self, step: int, index: int) -> None:
        batches = [self.case.spec.batch(rank, step) for rank in range(self.world)]
        if self.case.together is not None:
            self.case.together(self.ranks.models, batches, self.contexts)
            return
        for rank in range(self.world):
            seed_phase(rank, step, index)
            self.case.phases[index].run(self.ranks.models[rank], batches[rank], self.contexts[rank])


@functools.cache
def expected(case_id: str, world: int, stage: int) -> list[Trace]:
    """One trace per rank. Stages 2 and 3 follow the same rules."""
    from tests.patterns.rows import CASES

    if stage == 3:
        return expected(case_id, world, 2)
    return Oracle(CASES[case_id], world, stage).play()
