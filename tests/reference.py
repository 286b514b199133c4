"""The reference: plain torch in one process, with the programs of all ranks played one after the other.

Whatever a test compares a sharded model's gradients with comes from here. Other modules say which program is played
(tests/patterns/oracle.py, tests/fuzz/oracle.py, tests/multiproc/twin.py, tests/multiproc/idioms.py,
tests/pipeline/cases.py); the rules by which the ranks' gradients become one are in this file alone.

A *program* is what one rank does between two places where all ranks are. A *contribution* is what one backward brings
to one leaf on one rank. Contributions of one *group* are added up on their rank before anything is sent. A *timeline*
is all that happened to one leaf on one rank.

Rule 1  Ranks are reduced to their mean, (g_0 + g_1 + ...) / N: added in rank order, divided once at the end. Where they
        are replicas of a sharded model, each replica's ranks first: ((g_0 + g_1) + (g_2 + g_3)) / 4.
Rule 2  A rank without a contribution is left out of the sum, not of N. What no rank used keeps its gradient: None, or
        what was there before.
Rule 3  Stages 2 and 3 reduce every backward and add: grad += mean. The first backwards of all ranks since gradients
        were zeroed are one group, the second ones the next, and so on, also where some ranks have fewer of them.
Rule 4  Stage 1 adds up locally and reduces once: a group for everything. So do the backwards of one window, at every
        stage; after `no_sync()` the first backward behind the window belongs to it.
Rule 5  A leaf with hooks after accumulation is reduced in every backward, at every stage.
Rule 6  Zeroing forgets what came before it, and groups are counted anew. What is assigned comes before all groups.
Rule 7  A rank adds up the contributions of a group in one dtype and sends the sum in another (`Rounding`); what is sent
        is added up in fp32, or in the dtype of the parameter that is trained if that is wider, and reaches its `.grad`.

    rank 0 has the contributions a, b, c       Rule 3: grad += (a + d) / 2, grad += (b + e) / 2, grad += c / 2
    rank 1 has the contributions d, e          Rule 4: grad += ((a + b + c) + (d + e)) / 2
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

Grads = dict[str, Tensor | None]
LeafHook = Callable[[nn.Parameter], None]
Program = Callable[[nn.Module, int], object]  # of a model and a rank


# ---- the rules
def mean(by_rank: Iterable[Tensor | None], divisor: int, replicas: int = 1) -> Tensor | None:
    """Rules 1 and 2. Replicas are runs of neighbouring ranks, all of the same length."""
    grads = list(by_rank)
    length = len(grads) // replicas
    total = _sum(_sum(grads[first : first + length]) for first in range(0, len(grads), length))
    return None if total is None else total / divisor


def _sum(grads: Iterable[Tensor | None]) -> Tensor | None:
    present = [grad for grad in grads if grad is not None]
    return functools.reduce(torch.add, present) if present else None


def add_grad(param: nn.Parameter, grad: Tensor | None) -> None:
    if grad is not None:
        param.grad = grad if param.grad is None else param.grad + grad


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Bit for bit; no gradient is not a gradient of zeros."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


@dataclass(frozen=True)
class Rounding:
    """Rule 7. None: in the dtype that contributions have."""

    waiting: torch.dtype | None = None
    wire: torch.dtype | None = None

    def sent(self, contributions: Iterable[Tensor], trained: torch.dtype) -> Tensor | None:
        """What one rank brings to the sum of a group."""
        total = _sum(grad if self.waiting is None else grad.to(self.waiting) for grad in contributions)
        if total is None:
            return None
        sent = total if self.wire is None else total.to(self.wire)
        return sent.to(torch.promote_types(trained, torch.float32))


@dataclass(frozen=True)
class Contribution:
    group: int
    grad: Tensor


@dataclass(frozen=True)
class Zero:
    set_to_none: bool


Timeline = list[Contribution | Zero]


def replay(
    param: nn.Parameter,
    ranks: Sequence[Timeline],
    stage: int,
    hook: LeafHook | None = None,
    divisor: int | None = None,
    replicas: int = 1,
    rounding: Rounding = Rounding(),
) -> None:
    """Brings `param.grad` from where it was to where the timelines lead.

    `hook`: called after each addition, which makes it Rule 5. `divisor`: the world's size if not given."""
    cut = [_segments(timeline) for timeline in ranks]
    zeros = cut[0][1]
    assert all(other == zeros for _, other in cut), "programs zero their gradients on all ranks alike"
    for index in range(len(zeros) + 1):
        if index > 0 and param.grad is not None:  # Rule 6
            param.grad = None if zeros[index - 1].set_to_none else torch.zeros_like(param)
        parts = [segments[index] for segments, _ in cut]
        if stage == 1 and hook is None:  # Rule 4, unless it is Rule 5
            parts = [[Contribution(0, c.grad) for c in part] for part in parts]
        for group in _order(parts):
            sent = [rounding.sent((c.grad for c in part if c.group == group), param.dtype) for part in parts]
            total = mean(sent, divisor or len(ranks), replicas)
            add_grad(param, None if total is None else total.to(param.dtype))
            if hook is not None and total is not None:
                hook(param)


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


# ---- writing down what happens
class Recorder:
    """Writes down, for one rank's copy, what reaches each leaf and when gradients were zeroed."""

    def __init__(self, model: nn.Module) -> None:
        self.divisor = 1  # of every contribution (`Engine.gradient_divisor`)
        self._params = dict(model.named_parameters())
        self._handles: list[RemovableHandle] = []
        # Held: a leaf refers to its accumulation node weakly, and the hook goes with the node.
        self._nodes = [self._watch(name, p) for name, p in self._params.items()]
        self.begin()

    def begin(self) -> None:
        self.timelines: dict[str, Timeline] = {name: [] for name in self._params}
        self._restart()

    def close(self) -> None:
        """A graph that outlives the recorder keeps the nodes alive, but not its hooks."""
        for handle in self._handles:
            handle.remove()

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
            self.timelines[name].append(Contribution(group, grads[0].detach() / self.divisor))

        self._handles.append(node.register_prehook(seen))
        return node


# ---- playing
class PlainRanks:
    """A plain copy of the model for each rank. The first is also the one that is trained; the others follow it.

    `masters`: the one that is trained, where it has other dtypes than those that compute; all copies follow it."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        stage: int,
        hook: LeafHook | None = None,
        divisor: int | None = None,
        replicas: int = 1,
        masters: nn.Module | None = None,
        rounding: Rounding = Rounding(),
    ) -> None:
        self.models = list(models)
        self.recorders = [Recorder(model) for model in self.models]
        self.trained = self.models[0] if masters is None else masters
        self._followers = [model for model in self.models if model is not self.trained]
        self._rounding = rounding
        self.params = dict(self.trained.named_parameters())
        self._stage, self._hook, self._divisor = stage, hook, divisor
        self._replicas = replicas
        self._kept: Grads = dict.fromkeys(self.params)

    def begin(self) -> None:
        """Before the ranks' programs: each has nothing but what it will bring."""
        for model, recorder in zip(self.models, self.recorders, strict=True):
            model.zero_grad()
            recorder.begin()

    def reduce(self) -> None:
        """After them: the trained copy has the gradients that it had, and what the programs brought."""
        for name, param in self.params.items():
            param.requires_grad_(self.models[0].get_parameter(name).requires_grad)  # a program may have frozen it
            param.grad = self._kept[name]
            timelines = [recorder.timelines[name] for recorder in self.recorders]
            replay(param, timelines, self._stage, self._hook, self._divisor, self._replicas, self._rounding)

    @torch.no_grad()
    def follow(self, scope: str = "") -> None:
        """After the optimizer's step, of the parameters whose names start with `scope`.

        Only those: a copy would mark the graphs of the others as modified in place."""
        self._kept = {name: param.grad for name, param in self.params.items()}
        for model in self._followers:
            for name, param in model.named_parameters():
                if name.startswith(scope):
                    param.copy_(self.params[name])
                    param.requires_grad_(self.params[name].requires_grad)


def play(
    model: nn.Module,
    world: int,
    program: Program,
    stage: int,
    replicas: int = 1,
    masters: nn.Module | None = None,
    rounding: Rounding = Rounding(),
) -> None:
    """`program(model, rank)` for each rank; what they bring is added to the gradients of `model`, or of `masters`.

    One model is all ranks, one after the other: for programs that leave nothing but gradients behind, and that do not
    zero them."""
    trained = masters or model
    kept = {name: param.grad for name, param in trained.named_parameters()}
    timelines = []
    with contextlib.closing(Recorder(model)) as recorder:
        for rank in range(world):
            model.zero_grad()
            recorder.begin()
            program(model, rank)
            timelines.append(recorder.timelines)
    for name, param in trained.named_parameters():
        param.grad = kept[name]
        ranks = [of_rank[name] for of_rank in timelines]
        replay(param, ranks, stage, replicas=replicas, rounding=rounding)


def in_one_window(make: Callable[[], nn.Module], world: int, program: Program, divisor: int | None = None) -> Grads:
    """Rule 4 in torch's own words: what each rank's program leaves in `.grad` of a model of its own, and their mean."""
    by_rank = [_left_in_grad(make(), program, rank) for rank in range(world)]
    return {name: mean([grads[name] for grads in by_rank], divisor or world) for name in by_rank[0]}


def _left_in_grad(model: nn.Module, program: Program, rank: int) -> Grads:
    program(model, rank)
    return {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}


def joint_loss(losses: Sequence[Tensor]) -> Tensor:
    """The mean of the ranks' losses as one graph: for code that uses a loss as a value (closures, gradients of
    gradients). Its gradients are those of Rule 1 up to rounding: autograd adds the ranks up in an order of its own."""
    return sum(losses) / len(losses)
