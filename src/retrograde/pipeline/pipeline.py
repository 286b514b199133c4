"""`Pipeline`: a model cut into stages over ranks, and a schedule that trains it.

A step ends with an agreement: every rank says whether it failed, and the last stage's rank says the loss. Only
then are gradients reduced over data-parallel ranks and those of tied parameters added up, so that a failure on one
rank is one error on all of them and leaves nobody waiting.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from retrograde.comm.messages import decode_texts, encode
from retrograde.engine import Engine, shard
from retrograde.errors import PipelineError
from retrograde.layout import Units
from retrograde.optim import ShardedParameter
from retrograde.pipeline.blocks import Block, Chain, Model, Tie, blocks_of, divide, find_ties, keep, measured
from retrograde.pipeline.dryrun import check
from retrograde.pipeline.executor import Batch, Executor, Outcome, total_loss
from retrograde.pipeline.lowering import forward_only, lower
from retrograde.pipeline.schedule import Action, Schedule
from retrograde.pipeline.search import schedule_for
from retrograde.pipeline.stage import Lesson, Loss, Stage
from retrograde.pipeline.timeline import Timed
from retrograde.pipeline.transport import MeshTransport, Transport


@dataclass(frozen=True)
class Zero:
    """How the stages are sharded over the data-parallel ranks; see `rg.shard`.

    `gathered`: how many of its stages a rank keeps in memory, whole, from their first use to the last (at stage 3). By
    default a page comes and goes with each use, which takes the least memory and the most gathers.
    """

    stage: int = 3
    mesh: DeviceMesh | dist.ProcessGroup | None = None
    units: Units = "auto"
    reduce: str = "mean"
    resident: int | str = 0
    gathered: int | None = None


class Microbatches(tuple[Any, ...]):
    """Data that is already in microbatches, where cutting tensors along their first dimension is not right."""


@dataclass(frozen=True)
class Result:
    """`loss` is on every rank; `outputs`, one for each microbatch, on the rank of the last stage only."""

    loss: Tensor | None
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class Cut:
    """How the model is cut: before the blocks named in `at`, or balanced by `costs` of the blocks, or by the time that
    the first rank measures for the inputs in `sample`, or by parameters."""

    at: Sequence[str] | None = None
    costs: Sequence[float] | None = None
    sample: tuple[Any, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments that go with the sample


class Pipeline:
    def __init__(
        self,
        model: Model,
        *,
        schedule: str | Schedule,
        microbatches: int,
        loss: Loss | None = None,
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
        zero: Zero | None = None,
        cut: Cut | None = None,
    ) -> None:
        """Every rank of `mesh` gives the same model; each keeps its own stages (`parameters()`).

        `loss(output, target)` is the mean over a microbatch; without it the model's output is the loss.
        """
        self._group = _group(mesh)
        self.rank = dist.get_rank(self._group)
        self.schedule = schedule_for(schedule, dist.get_world_size(self._group), microbatches)
        self.device = torch.device("cpu")
        blocks = blocks_of(model)
        groups = divide(blocks, self.schedule.stages, cut.at if cut else None, self._costs(blocks, cut, zero))
        mine = self.schedule.stages_of(self.rank)
        self._ties = [tie for tie in find_ties(groups, self.schedule.placement) if self.rank in tie.ranks]
        keep(blocks, [block.module for stage in mine for block in groups[stage]], self.device)
        chains = {stage: Chain([block.module for block in groups[stage]]) for stage in mine}
        last = self.schedule.last_stage
        self._names = dict(_names([block for stage in mine for block in groups[stage]]))
        self.engine = self._shard(zero, list(chains.values()))
        self.stages = {
            number: Stage(number, chain, (loss or _itself) if number == last else None)
            for number, chain in chains.items()
        }
        self._agreeing = [self._group] if zero is None else [self._group, _group(zero.mesh)]
        self._transport: Transport = MeshTransport(self._group, self.device)
        self._executor = self._make_executor(self.schedule, zero)
        self._evaluator = self._make_executor(forward_only(self.schedule), zero)
        self.trace: list[Timed] = []
        dist.barrier(self._group)  # messages come only when everybody can receive them

    # ---- what users hold
    def parameters(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages, by their names in the whole model."""
        yield from self._names.items()

    def modules(self) -> list[nn.Module]:
        return [stage.module for stage in self.stages.values()]

    def step(self, *args: Any, target: Any = None, **options: Any) -> Tensor:
        """Forward and backward of a batch. Returns the loss, detached, on every rank; gradients are in the leaves.

        `args` matter on the rank of the first stage, `target` on that of the last; `options` are keyword arguments
        for whichever blocks accept them.
        """
        loss = self._train(self._batch(args, target, options, learn=True)).loss
        assert loss is not None
        return loss

    def run(self, *args: Any, target: Any = None, **options: Any) -> Result:
        """A step that also returns the outputs, detached."""
        return self._train(replace(self._batch(args, target, options, learn=True), keep_outputs=True))

    def _train(self, batch: Batch) -> Result:
        with torch.enable_grad(), self._one_reduction(), self._summed_ties():
            return self._finish(self._executor.run(batch))

    def evaluate(self, *args: Any, target: Any = None, **options: Any) -> Result:
        """Forward only. The loss is computed if there is a target."""
        batch = self._batch(args, target, options, learn=target is not None)
        with torch.no_grad():
            return self._finish(self._evaluator.run(replace(batch, keep_outputs=True)))

    def watch(self, told: Callable[[Action], None] | None) -> None:
        """Call `told` after each action of this rank in later steps (tests, progress, traces)."""
        self._executor.watch = told

    def train(self, mode: bool = True) -> "Pipeline":
        for module in self.modules():
            module.train(mode)
        return self

    def eval(self) -> "Pipeline":
        return self.train(False)

    # ---- parts
    def _costs(self, blocks: list[Block], cut: Cut | None, zero: Zero | None) -> Sequence[float] | None:
        if cut is None or cut.sample is None:
            return cut.costs if cut else None
        costs = torch.zeros(len(blocks), dtype=torch.float64)
        if self.rank == 0:
            costs = torch.tensor(measured(blocks, cut.sample, dict(cut.options)), dtype=torch.float64)
        for group in [self._group] if zero is None else [self._group, _group(zero.mesh)]:
            dist.broadcast(costs, group=group, group_src=0)  # all replicas are cut alike
        return costs.tolist()

    def _shard(self, zero: Zero | None, chains: list[Chain]) -> Engine | None:
        if zero is None:
            return None
        return shard(
            nn.ModuleList(chains),
            zero.stage,
            units=zero.units,
            process_group=_group(zero.mesh),
            reduce=zero.reduce,
            resident=zero.resident,
        )

    def _make_executor(self, schedule: Schedule, zero: Zero | None) -> Executor:
        lowered = lower(schedule, gathered=None if zero is None else zero.gathered)
        check(lowered)
        return Executor(lowered, self.rank, self.stages, self._transport)

    def _summed_ties(self) -> contextlib.AbstractContextManager[None]:
        if self.engine is None:
            return _summed_once(self._ties, self._group, self.rank)
        return _summed_unreduced(self._ties, self._group, self.rank, self.engine)

    def _one_reduction(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.engine is None else self.engine.coalesce()

    def _batch(self, args: tuple[Any, ...], target: Any, options: dict[str, Any], learn: bool) -> Batch:
        count = self.schedule.microbatches
        first, last = 0 in self.stages, self.schedule.last_stage in self.stages
        inputs = [tuple(parts) for parts in zip(*(_cut(arg, count, "args") for arg in args), strict=True)]
        if first and not inputs:
            raise PipelineError(f"rank {self.rank} holds the first stage and needs the inputs: step(x, ...)")
        cut = {name: _cut(value, count, name) for name, value in options.items()}
        kwargs = [{name: parts[number] for name, parts in cut.items()} for number in range(count)]
        targets = _cut(target, count, "target")
        sizes = [_size(t) or _size(x) or 1 for t, x in zip(targets, inputs or [()] * count, strict=True)]
        lessons = [Lesson(t, n / sum(sizes)) if learn and last else None for t, n in zip(targets, sizes, strict=True)]
        return Batch(inputs, kwargs, lessons)

    def _finish(self, outcome: Outcome) -> Result:
        """All ranks have come to the end of the step: agree on how it went."""
        self.trace = outcome.trace
        loss = total_loss(outcome.losses)
        failed, value = self._agree(outcome, loss)
        if failed:
            raise PipelineError("\n".join(failed)) from outcome.error
        if loss is None and not math.isnan(value):
            loss = torch.tensor(value)
        return Result(loss, tuple(output for _, output in sorted(outcome.outputs.items())))

    def _agree(self, outcome: Outcome, loss: Tensor | None) -> tuple[list[str], float]:
        """The failures of all ranks, and the loss."""
        value = math.nan if loss is None else float(loss)
        failures = [] if outcome.failure is None else [str(outcome.failure)]
        void = outcome.void
        for group in self._agreeing:
            mine = torch.tensor([float(void), value if group is self._group else math.nan], dtype=torch.float64)
            everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(everyone, mine, group=group)
            void = any(bool(theirs[0]) for theirs in everyone)
            value = next((float(theirs[1]) for theirs in everyone if not math.isnan(theirs[1])), value)
            if void:
                failures = sorted({text for by_rank in _everybodys_texts(failures, group) for text in by_rank})
        return failures, value


def _everybodys_texts(texts: list[str], group: dist.ProcessGroup) -> list[list[str]]:
    """The texts of all ranks of a group, which all call this."""
    packed = encode(texts)
    length = torch.tensor([len(packed)])
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(each) for each in lengths)
    mine = torch.frombuffer(bytearray(packed.ljust(longest, b"\0")), dtype=torch.uint8)
    everybodys = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everybodys, mine, group=group)
    return [
        decode_texts(theirs[: int(each)].numpy().tobytes()) for theirs, each in zip(everybodys, lengths, strict=True)
    ]


def _itself(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise PipelineError(f"the model returns a {type(output).__name__}; give loss=... to make a number of it")
    return output


def _group(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise PipelineError(f"mesh has dimensions {mesh.mesh_dim_names}; give one of them, as in mesh['pp']")
        return mesh.get_group()
    if mesh is not None:
        return mesh
    if not dist.is_initialized():
        raise PipelineError("there is no process group; start with torchrun and call dist.init_process_group()")
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _names(blocks: list[Block]) -> Iterator[tuple[str, nn.Parameter]]:
    seen: set[int] = set()
    for block in blocks:
        for name, parameter in block.module.named_parameters(prefix=block.name):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def _cut(value: Any, count: int, name: str) -> list[Any]:
    """`value` for each microbatch: tensors are cut along their first dimension, anything else is for all."""
    if isinstance(value, Microbatches):
        if len(value) != count:
            raise PipelineError(f"{name}: {len(value)} microbatches are given, the schedule has {count}")
        return list(value)
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] < count):
            raise PipelineError(f"{name}: a tensor of shape {list(leaf.shape)} cannot be cut into {count} microbatches")

    def part(number: int) -> Any:
        return tree_map(lambda x: torch.tensor_split(x, count)[number] if isinstance(x, Tensor) else x, value)

    return [part(number) for number in range(count)]


def _size(tree: Any) -> int:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return 0


@contextlib.contextmanager
def _summed_once(ties: list[Tie], group: dist.ProcessGroup, rank: int) -> Iterator[None]:
    """Gradients of parameters that several ranks hold: what this step adds is summed over them, in stage order."""
    before = [tie.parameter.grad for tie in ties]
    for tie in ties:
        tie.parameter.grad = None
    try:
        yield
        for tie in ties:
            tie.parameter.grad = _sum_tie(tie, tie.parameter.grad, tie.parameter.shape, group, rank)
    finally:
        for tie, old in zip(ties, before, strict=True):
            if old is not None:
                new = tie.parameter.grad
                tie.parameter.grad = old if new is None else old.add_(new)


@contextlib.contextmanager
def _summed_unreduced(ties: list[Tie], group: dist.ProcessGroup, rank: int, engine: Engine) -> Iterator[None]:
    """The same for sharded parameters, in each replica, before replicas are reduced: the order of plain torch."""
    if ties:
        engine.reducer.settle("a pipeline step with tied parameters")  # what waits after it is this step's
    yield
    for tie in ties:
        leaf = tie.parameter
        assert isinstance(leaf, ShardedParameter)
        waiting = engine.reducer.pending.get(leaf.unit.index)
        own = waiting.place(leaf.place) if waiting is not None and waiting.present[leaf.place] else None
        total = _sum_tie(tie, own, leaf.slot.shape, group, rank)
        if own is not None and total is not None:
            own.copy_(total.view(-1))
        elif total is not None:
            grads = [total if other is leaf else None for other in leaf.unit.leaves]
            engine.reducer.keep(leaf.unit, grads)


def _sum_tie(tie: Tie, own: Tensor | None, shape: torch.Size, group: dist.ProcessGroup, rank: int) -> Tensor | None:
    """The first rank adds up and sends the sum to the others. A rank without a gradient says so first."""
    lead, *others = tie.ranks
    own = None if own is None else own.view(shape)

    def room() -> Tensor:
        return torch.empty(shape, dtype=tie.parameter.dtype)

    if rank != lead:
        flag = torch.tensor([own is not None], dtype=torch.int64)
        dist.send(flag, group=group, group_dst=lead)
        if own is not None:
            dist.send(own.contiguous(), group=group, group_dst=lead)
        dist.recv(flag, group=group, group_src=lead)
        total = room() if flag.item() else None
        if total is not None:
            dist.recv(total, group=group, group_src=lead)
        return total
    flag = torch.zeros(1, dtype=torch.int64)
    for other in others:
        dist.recv(flag, group=group, group_src=other)
        if flag.item():
            part = room()
            dist.recv(part, group=group, group_src=other)
            own = part if own is None else own + part
    for other in others:
        dist.send(torch.tensor([own is not None], dtype=torch.int64), group=group, group_dst=other)
        if own is not None:
            dist.send(own.contiguous(), group=group, group_dst=other)
    return own
