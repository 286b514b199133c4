"""The reference: plain torch, one process, the ranks' batches one after the other.

Every rank has a plain copy of the model. What reaches a leaf of a copy is recorded with the number of the
backward that brought it, and the recordings are replayed under the rules of the stage:

Rule 1  stages 2 and 3 reduce every backward and add: grad += mean over the ranks.
Rule 2  stage 1 adds up locally and reduces once; so do the backwards of one window, at every stage.
Rule 3  the mean is (g_0 + g_1 + ...) / N in rank order. A rank without a contribution is left out of the
        sum, not of N. N is a power of two here, so that dividing by it and multiplying by 1/N agree.
Rule 4  what no rank used keeps its gradient: None, or what was there before.
Rule 5  a leaf with hooks after accumulation is reduced in every backward, at every stage.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from tests.patterns.context import NaturalContext
from tests.patterns.driver import build, optimizers, seed_phase, snapshot
from tests.patterns.models import Spec
from tests.patterns.registry import Case, LeafHook
from tests.patterns.trace import Grads, Trace


@dataclass(frozen=True)
class Contribution:
    group: int  # contributions of one group are added up locally before they are reduced
    grad: Tensor


@dataclass(frozen=True)
class Zero:
    set_to_none: bool


Timeline = list[Contribution | Zero]


class Recorder:
    """Writes down, for one rank's copy, what reaches each leaf and when gradients were zeroed."""

    def __init__(self, model: nn.Module) -> None:
        self._params = dict(model.named_parameters())
        # Held: a leaf refers to its accumulation node weakly, and the hook goes with the node.
        self._nodes = [self._watch(name, p) for name, p in self._params.items()]
        self.begin()

    def begin(self) -> None:
        self.timelines: dict[str, Timeline] = {name: [] for name in self._params}
        self._restart()

    def zero(self, set_to_none: bool) -> None:
        for timeline in self.timelines.values():
            timeline.append(Zero(set_to_none))
        inside = self._window is not None
        self._restart()
        if inside:
            self._window = self._new_group()

    def assign(self, name: str, grad: Tensor | None) -> None:
        self.timelines[name].append(Zero(True))
        if grad is not None:
            self.timelines[name].append(Contribution(0, grad.clone()))

    @contextlib.contextmanager
    def window(self, joins_next: bool) -> Iterator[None]:
        """`joins_next`: the first backward after the window is reduced with it (`no_sync`)."""
        self._window = self._new_group()
        try:
            yield
        finally:
            self._open, self._window = (self._window if joins_next else None), None

    def _restart(self) -> None:
        self._groups: dict[int, int] = {}
        self._next = 0
        self._window: int | None = None
        self._open: int | None = None

    def _new_group(self) -> int:
        self._next += 1
        return self._next - 1

    def _group_of(self, task: int) -> int:
        if task not in self._groups:
            if self._window is not None:
                self._groups[task] = self._window
            elif self._open is not None:
                self._groups[task], self._open = self._open, None
            else:
                self._groups[task] = self._new_group()
        return self._groups[task]

    def _watch(self, name: str, param: nn.Parameter) -> Node:
        """A hook before the accumulation: it sees what the user's hooks made of the gradient, and nothing of
        `torch.autograd.grad`, which does not accumulate."""
        trained = param.requires_grad
        with torch.enable_grad():
            node = param.requires_grad_().view_as(param).grad_fn.next_functions[0][0]
        param.requires_grad_(trained)

        def seen(grads: tuple[Tensor, ...]) -> None:
            group = self._group_of(torch._C._current_graph_task_id())
            self.timelines[name].append(Contribution(group, grads[0].detach().clone()))

        node.register_prehook(seen)
        return node


class OracleContext(NaturalContext):
    """Plain torch, with the things that a replay must know of written down."""

    def __init__(self, spec: Spec, model: nn.Module, rank: int, world: int) -> None:
        super().__init__(spec, model)
        self.rank, self.world = rank, world
        self.recorder = Recorder(model)

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


def _segments(timeline: Timeline) -> tuple[list[list[Contribution]], list[Zero]]:
    """A timeline cut at its zeros."""
    parts: list[list[Contribution]] = [[]]
    zeros: list[Zero] = []
    for entry in timeline:
        if isinstance(entry, Zero):
            zeros.append(entry)
            parts.append([])
        else:
            parts[-1].append(entry)
    return parts, zeros


def _order(ranks: Sequence[Sequence[Contribution]]) -> list[int]:
    """The groups in the order in which they are added to a leaf.

    Usually ascending. A backward inside another one ends first although it began later: then the order seen
    counts, and all ranks see the same one."""
    seen = [list(dict.fromkeys(c.group for c in rank)) for rank in ranks]
    if all(groups == sorted(groups) for groups in seen):
        return sorted({group for groups in seen for group in groups})
    return list(dict.fromkeys(group for groups in seen for group in groups))


def _local_sum(contributions: Sequence[Contribution]) -> Tensor | None:
    if not contributions:
        return None
    return functools.reduce(torch.add, [c.grad for c in contributions])


def _mean(locals_: Sequence[Tensor | None], divisor: int) -> Tensor | None:
    present = [g for g in locals_ if g is not None]
    return functools.reduce(torch.add, present) / divisor if present else None


def replay(
    param: nn.Parameter, ranks: Sequence[Timeline], stage: int, hook: LeafHook | None = None, divisor: int | None = None
) -> None:
    """Brings `param.grad` from where it was to where the timelines lead. `divisor`: the world's size by default."""
    cut = [_segments(timeline) for timeline in ranks]
    zeros = cut[0][1]
    assert all(other == zeros for _, other in cut), "rows zero their gradients on all ranks alike"
    for index in range(len(zeros) + 1):
        if index > 0 and param.grad is not None:
            param.grad = None if zeros[index - 1].set_to_none else torch.zeros_like(param)
        parts = [segments[index] for segments, _ in cut]
        if stage == 1:
            parts = [[Contribution(0, c.grad) for c in part] for part in parts]
        for group in _order(parts):
            mean = _mean([_local_sum([c for c in part if c.group == group]) for part in parts], divisor or len(ranks))
            if mean is not None:
                param.grad = mean if param.grad is None else param.grad + mean
                if hook is not None:
                    hook(param)


class Oracle:
    """Plays a case for all ranks of a world."""

    def __init__(self, case: Case, world: int, stage: int) -> None:
        self.case, self.world, self.stage = case, world, stage
        self.models = [build(case) for _ in range(world)]
        self.contexts: list[OracleContext] = []
        for rank, model in enumerate(self.models):
            # The recorder needs the parameters that setup may add, and setup a context: so in two steps.
            setup_context = NaturalContext(case.spec, model)
            if case.setup is not None:
                case.setup(model, setup_context)
            context = OracleContext(case.spec, model, rank, world)
            context.memo = setup_context.memo
            self.contexts.append(context)
        # The first copy is also the model that is trained; the others follow it.
        self.trained = self.models[0]
        self.params = dict(self.trained.named_parameters())
        self.optimizers = optimizers(case, self.trained)
        self.reduced: Grads = dict.fromkeys(self.params)

    def play(self) -> list[Trace]:
        grads = []
        for step in range(self.case.steps):
            for context in self.contexts:
                context.step = step
            for index in range(len(self.case.phases)):
                grads.append(self._phase(step, index))
        traces = []
        for model, context in zip(self.models, self.contexts, strict=True):
            traces.append(Trace(grads, snapshot(model.state_dict()), context.records, []))
        return traces

    def _phase(self, step: int, index: int) -> Grads:
        phase = self.case.phases[index]
        for model, context in zip(self.models, self.contexts, strict=True):
            model.zero_grad()
            context.recorder.begin()
        self._run(step, index)
        self._replay()
        if self.case.edit is not None:
            self.case.edit(self.trained, self.contexts[0])
        if self.case.optimizer_steps:
            self.optimizers[phase.scope].step()
        grads = snapshot({name: p.grad for name, p in self.params.items()})
        # Once a run has diverged, everything is NaN on both sides and nothing is compared any more.
        assert all(g is None or g.isfinite().all() for g in grads.values()), f"{self.case.id} diverges"
        if self.case.after is not None:
            self.case.after(self.trained, self.contexts[0])
        if not self.case.keep_grads:
            self.trained.zero_grad()
        self.reduced = {name: p.grad for name, p in self.params.items()}
        self._follow(phase.scope)
        return grads

    def _run(self, step: int, index: int) -> None:
        batches = [self.case.spec.batch(rank, step) for rank in range(self.world)]
        if self.case.together is not None:
            self.case.together(self.models, batches, self.contexts)
            return
        for rank in range(self.world):
            seed_phase(rank, step, index)
            self.case.phases[index].run(self.models[rank], batches[rank], self.contexts[rank])

    def _replay(self) -> None:
        for name, param in self.params.items():
            param.grad = self.reduced[name]
            timelines = [context.recorder.timelines[name] for context in self.contexts]
            stage = self.stage if self.case.leaf_hook is None else 2
            replay(param, timelines, stage, self.case.leaf_hook)

    @torch.no_grad()
    def _follow(self, scope: str) -> None:
        # Only what took a step: a copy would mark the graphs of the others as modified in place.
        for model in self.models[1:]:
            for name, param in model.named_parameters():
                if name.startswith(scope):
                    param.copy_(self.params[name])


@functools.cache
def expected(case_id: str, world: int, stage: int) -> list[Trace]:
    """One trace per rank. Stages 2 and 3 follow the same rules."""
    from tests.patterns.rows import CASES

    if stage == 3:
        return expected(case_id, world, 2)
    return Oracle(CASES[case_id], world, stage).play()
