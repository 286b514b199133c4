"""`Pipeline`: a model cut into stages over ranks, and a schedule that trains it.

A step ends with an agreement: every rank says whether it failed, and the last stage's rank says the loss. Only
then are gradients reduced over data-parallel ranks and those of tied parameters added up, so that a failure on one
rank is one error on all of them and leaves nobody waiting.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from retrograde.arguments import Said, flag, function, instance, said, seconds, shown, whole_number
from retrograde.devices import streams_of
from retrograde.engine import Engine, shard
from retrograde.engine.materialize import Initializer
from retrograde.errors import PipelineError, RetrogradeError
from retrograde.layout import Precision, parse_bytes
from retrograde.pipeline.account import table
from retrograde.pipeline.again import Pending
from retrograde.pipeline.agreement import end_of_step, together
from retrograde.pipeline.batches import CallerGradients, copied, merged, microbatches, shares_of, size
from retrograde.pipeline.blocks import (
    Block,
    Chain,
    Model,
    OwnStages,
    accepted,
    blocks_of,
    check_dtypes_of_ties,
    device_of_blocks,
    divide,
    find_ties,
    joint,
    materialize_stages,
    measured,
)
from retrograde.pipeline.connecting import PATIENCE, connect, patience_of
from retrograde.pipeline.dryrun import check
from retrograde.pipeline.dtypes import StageCasts
from retrograde.pipeline.executor import Batch, Executor, Outcome, total_loss
from retrograde.pipeline.loss_path import LossPath, ways_of
from retrograde.pipeline.lowering import forward_only, lower
from retrograde.pipeline.options import (
    Cut,
    RanksOfPipeline,
    Zero,
    arguments_to_compare,
    check_apart,
    checked_reduction,
    group_of,
    named_schedule,
)
from retrograde.pipeline.schedule import Action, Schedule
from retrograde.pipeline.search import schedule_for
from retrograde.pipeline.stage import Loss, Stage, WeightedTarget
from retrograde.pipeline.ties import TiedParameters, TieSums
from retrograde.pipeline.timeline import Timed
from retrograde.pipeline.transport import StageTransport
from retrograde.torch_internals import check_before_first_use
from retrograde.transport import PipelineRanks, Transport
from retrograde.transport.values import exchange


@dataclass(frozen=True)
class Result:
    """`loss` is on every rank; `outputs` and `losses`, one for each microbatch, on the rank of the last stage only.

    `losses` are what the loss function returned for each, detached. `loss` is their sum, or their mean weighted by the
    number of samples, as `loss_reduction` says.
    """

    loss: Tensor | None
    outputs: tuple[Any, ...]
    losses: tuple[Tensor, ...]

    @property
    def output(self) -> Any:
        """The outputs of all microbatches as one: their tensors put together along the first dimension. None on ranks
        that have no outputs."""
        return merged(self.outputs)


class StepArguments(NamedTuple):
    """What the caller of a step gave on this rank."""

    args: tuple[Any, ...]
    target: Any
    options: dict[str, Any]


class Pipeline:
    """A model whose stages are on the ranks of a group, and a schedule that trains it step by step."""

    rank: int  # in the group of the pipeline
    schedule: Schedule
    stages: dict[int, Stage]  # this rank's stages, by number
    engine: Engine | None  # the engine of this rank's stages, with ZeRO
    trace: list[Timed]  # what this rank did in the last step, and when

    def __init__(
        self,
        model: Model | OwnStages,
        *,
        schedule: str | Schedule,
        microbatches: int,
        loss: Loss | None = None,
        loss_reduction: str = "mean",
        mesh: RanksOfPipeline = None,
        zero: Zero | None = None,
        cut: Cut | None = None,
        pending: float | str | None = None,
        init: Initializer | None = None,
        timeout: float = PATIENCE,
    ) -> None:
        """Every rank of `mesh` gives the same model; each keeps its own stages (`parameters()`).

        `mesh`: one dimension of a mesh, a process group, or ranks of another kind than processes (transport/).
        `loss(output, target)` is the mean over a microbatch, and the step's loss the mean over all samples. With
        `loss_reduction="sum"` it is a sum: losses and gradients of microbatches add up. Without `loss` the output is
        the loss. `pending` limits the bytes between I and W on a rank ("64MiB"): of microbatches beyond it, and unless
        it is given of all but one of a checkpointed stage, input and output gradient are kept, and W repeats them.
        `init` is as for `rg.shard`, of the modules of each block. `timeout`: seconds until a rank that does not come
        or sends nothing is an error; ZeRO's own waits have that of `rg.shard`."""
        own = self._connect(mesh, zero, timeout)
        with together(self._transports, "Pipeline()") as arguments:
            check_before_first_use()
            count = whole_number("microbatches", microbatches, 1, "a whole number, 1 or more", PipelineError)
            self._check_parts(loss, zero, cut, init, timeout)
            self._loss_reduction = checked_reduction(loss_reduction)
            self._pending = Pending(None if pending is None else parse_bytes(pending, "pending"))
            self.schedule = schedule_for(named_schedule(schedule), own.world, count)
            blocks = blocks_of(model)
            self.device = device_of_blocks(blocks)
            costs = self._measured(blocks, cut)
            arguments += self._own_arguments(loss_reduction, pending)
            arguments += arguments_to_compare(schedule, self.schedule, zero, cut)
        self._open(own)
        self._take_stages(blocks, self._divide(model, blocks, cut, costs), loss, zero, init)
        self._accepted = self._accepted_on_any_rank(blocks)  # afterwards all ranks can receive messages

    @classmethod
    def from_stage_modules(
        cls,
        stages: Mapping[int, nn.Module],
        *,
        schedule: str | Schedule,
        microbatches: int,
        loss: Loss | None = None,
        scale_grads: bool = True,
        mesh: RanksOfPipeline = None,
        zero: Zero | None = None,
        pending: float | str | None = None,
        timeout: float = PATIENCE,
    ) -> "Pipeline":
        """A pipeline of stages that the user has cut: each rank gives its own, by their numbers in the schedule.

        With `scale_grads` gradients are those of the mean over microbatches, weighted by size; without, of the sum.
        Parameters have the names that they have in their module, after the number of their stage. A weight that two
        ranks share is two weights here: give the whole model to `Pipeline` if weights are tied over ranks.
        """
        reduction = "mean" if flag("scale_grads", scale_grads, PipelineError) else "sum"
        own = OwnStages(stages)
        return cls(
            own,
            schedule=schedule,
            microbatches=microbatches,
            loss=loss,
            loss_reduction=reduction,
            mesh=mesh,
            zero=zero,
            pending=pending,
            timeout=timeout,
        )

    # ---- what users hold
    def parameters(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages, by their names in the whole model."""
        yield from self._names.items()

    def named_blocks(self) -> Iterator[tuple[str, nn.Module]]:
        """The blocks of this rank's stages, by their names in the whole model."""
        for block in self._blocks:
            yield block.name, block.module

    def modules(self) -> list[nn.Module]:
        return [stage.module for stage in self.stages.values()]

    def step(self, *args: Any, target: Any = None, **options: Any) -> Tensor:
        """Forward and backward of a batch. Returns the loss, detached, on every rank; gradients are in the leaves.

        `args` matter on the rank of the first stage, `target` on that of the last; `options` are keyword arguments
        for whichever blocks accept them. Tensors among them that require gradients get theirs on these ranks, and
        backward goes on into the graph they have.
        """
        loss = self._train(StepArguments(args, target, options), keep_outputs=False).loss
        assert loss is not None
        return loss

    def run(self, *args: Any, target: Any = None, **options: Any) -> Result:
        """A step that also returns the outputs and the losses of the microbatches, detached."""
        return self._train(StepArguments(args, target, options), keep_outputs=True)

    def _train(self, given: StepArguments, keep_outputs: bool) -> Result:
        self._check_going()
        gradients = CallerGradients()

        def batch() -> Batch:
            return replace(self._batch(given, learn=True, gradients=gradients), keep_outputs=keep_outputs)

        with torch.enable_grad(), self._one_reduction(), self._summed_ties():
            result = self._finish(self._executor, batch)
        gradients.deliver()
        return result

    def evaluate(self, *args: Any, target: Any = None, **options: Any) -> Result:
        """Forward only. The loss is computed if there is a target."""
        self._check_going()

        def batch() -> Batch:
            made = self._batch(StepArguments(args, target, options), learn=target is not None)
            return replace(made, keep_outputs=True)

        with torch.no_grad():
            return self._finish(self._evaluator, batch)

    def watch(self, told: Callable[[Action], None] | None) -> None:
        """Call `told` after each action of this rank in later steps (tests, progress, traces)."""
        if told is not None:
            function("told", told, "a function of an action, or None", PipelineError)
        self._executor.watch = told

    def explain(self) -> str:
        """What of the weight gradients' work waits for W on this rank, and what does not: a paragraph for each stage.

        It is about the first microbatch whose backward was split, so there is nothing to tell before the first step.
        """
        texts = []
        for number, stage in self.stages.items():
            text = table(stage.works()) if stage.account.open else "no backward has been split yet"
            texts.append(f"stage {number}: {text}")
        return "\n".join(texts)

    def train(self, mode: bool = True) -> "Pipeline":
        flag("mode", mode, PipelineError)
        for module in self.modules():
            module.train(mode)
        return self

    def eval(self) -> "Pipeline":
        return self.train(False)

    # ---- making it
    def _connect(self, mesh: RanksOfPipeline, zero: Zero | None, timeout: float) -> PipelineRanks:
        """Connect to the ranks of this pipeline, which are returned, and to the replicas of this rank."""
        self._tied = TiedParameters()
        self._patience = patience_of(timeout)
        self.trace = []
        self._ended: str | None = None  # why there will be no other step
        own, self._circles = connect(mesh, zero, self._tied, self._patience)
        self._transports = [circle.transport for circle in self._circles]
        self.rank = own.rank
        return own

    def _open(self, own: PipelineRanks) -> None:
        """Open the ways of stages, loss and ties. All ranks have agreed on one schedule and kind of device by now."""
        self._streams = streams_of(self.device)
        channel = own.channel(self._streams, self._patience, ways_of(self.schedule))
        self._transport = StageTransport(channel, self.rank, self._streams)
        self._loss_path = LossPath(self.schedule, self.rank, self._transport)
        self._of_ties: Transport = self._transports[0]
        if not self._streams.on_host:
            self._of_ties = own.transport(self._tied, self._streams, self._patience)

    def _accepted_on_any_rank(self, blocks: list[Block]) -> list[str] | None:
        """A rank may know its own blocks alone (`from_stage_modules`)."""
        return joint(exchange(self._transports[0], "Pipeline() is done", accepted(blocks)))

    def _own_arguments(self, loss_reduction: str, pending: float | str | None) -> list[Said]:
        return [
            said("loss_reduction", loss_reduction, loss_reduction),
            said("pending", pending, self._pending.limit),
            said("model", f"on {self.device.type}", self.device.type),
        ]

    def _check_parts(self, loss: Any, zero: Any, cut: Any, init: Any, timeout: Any) -> None:
        seconds("timeout", timeout, PipelineError)
        if init is not None:
            function("init", init, "a function of a module, or None", PipelineError)
        if loss is not None:
            function("loss", loss, "a function of output and target, or None", PipelineError)
        if zero is not None:
            instance("zero", zero, Zero, "is not known", "rg.Zero(stage=...) or None", PipelineError)
            check_apart(zero, *(circle.in_job for circle in self._circles))
        if cut is not None:
            instance("cut", cut, Cut, "is not known", "rg.Cut(...) or None", PipelineError)

    def _measured(self, blocks: list[Block], cut: Cut | None) -> list[float] | None:
        """On the first rank, measure seconds for each block if the cut is balanced by them; None on the others."""
        if cut is None or cut.sample is None or self.rank != 0:
            return None
        return measured(blocks, cut.sample, dict(cut.options))

    def _divide(
        self, model: Model | OwnStages, blocks: list[Block], cut: Cut | None, costs: list[float] | None
    ) -> list[list[Block]]:
        """Divide blocks into stages. All ranks check that they have divided alike."""
        with together(self._transports, "Pipeline()") as arguments:
            if isinstance(model, OwnStages):
                return model.by_stage(self.schedule.stages, self.schedule.stages_of(self.rank))
            at = None if cut is None else cut.at
            by_stage = divide(blocks, self.schedule.stages, at, self._same_costs(costs, cut))
            starts = [group[0].name for group in by_stage[1:]]
            arguments.append(Said(repr(starts), f"cut at {shown(starts)}"))
        return by_stage

    def _take_stages(
        self,
        blocks: list[Block],
        by_stage: list[list[Block]],
        loss: Loss | None,
        zero: Zero | None,
        init: Initializer | None,
    ) -> None:
        """Make this rank's stages real, shard them, and make the executors that run them."""
        mine = {stage: by_stage[stage] for stage in self.schedule.stages_of(self.rank)}
        own = [block for group in mine.values() for block in group]
        precision = Precision.of(None if zero is None else zero.precision)
        self._ties = self._tie_sums(by_stage, precision)
        materialize_stages(blocks, [block.module for block in own], self.device, init)
        self._blocks = own
        self._names = dict(_names(own))
        last = self.schedule.last_stage
        chains = {stage: _chain(mine[stage], StageCasts.of(stage, last, precision)) for stage in mine}
        self.engine = self._shard(zero, list(chains.values()))
        self._pending.stages = len(chains)
        self.stages = {
            number: Stage(
                number,
                chain,
                split=self.schedule.split_microbatches(number),
                pending=self._pending,
                device=self.device,
            )
            for number, chain in chains.items()
        }
        if last in self.stages:
            self.stages[last].loss = loss or _itself
        self._executor = self._make_executor(self.schedule, zero)
        self._evaluator = self._make_executor(forward_only(self.schedule), zero)

    def _tie_sums(self, by_stage: list[list[Block]], precision: Precision) -> TieSums:
        ties = find_ties(by_stage, self.schedule.placement)
        check_dtypes_of_ties(by_stage, ties, precision)
        return TieSums(ties, self._tied, self._of_ties, self._streams)

    def _same_costs(self, costs: list[float] | None, cut: Cut | None) -> Sequence[float] | None:
        """The costs by which all ranks cut: those given in `cut`, or those that the first rank has measured."""
        if cut is None:
            return None
        if cut.sample is None:
            return cut.costs
        for transport in self._transports:
            costs = exchange(transport, "costs of blocks", costs)[0]  # all replicas are cut alike
        return costs

    def _shard(self, zero: Zero | None, chains: list[Chain]) -> Engine | None:
        if zero is None:
            return None
        return shard(
            nn.ModuleList(chains),
            zero.stage,
            units=zero.units,
            process_group=group_of("zero.mesh", zero.mesh, "dp"),
            reduce=zero.reduce,
            resident=zero.resident,
            precision=zero.precision,
        )

    def _make_executor(self, schedule: Schedule, zero: Zero | None) -> Executor:
        lowered = lower(schedule, gathered=None if zero is None else zero.gathered)
        check(lowered)
        return Executor(lowered, self.rank, self.stages, self._transport)

    # ---- a step
    def _summed_ties(self) -> contextlib.AbstractContextManager[None]:
        if self.engine is None:
            return self._ties.of_plain()
        return self._ties.of_sharded(self.engine)

    def _one_reduction(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.engine is None else self.engine.coalesce()

    def _batch(self, given: StepArguments, learn: bool, gradients: CallerGradients | None = None) -> Batch:
        """Cut the given values into microbatches. With `gradients`, stand-ins replace tensors that require one."""
        count = self.schedule.microbatches
        first = 0 in self.stages
        last = self.schedule.last_stage in self.stages
        self._check_options(given.options)
        by_argument = []
        for arg in given.args:
            if gradients is not None and first:
                by_argument.append(microbatches(copied(arg), count, "args", gradients))
            else:
                by_argument.append(microbatches(arg, count, "args"))
        inputs = [tuple(parts) for parts in zip(*by_argument, strict=True)]
        if first and not inputs:
            raise PipelineError("this rank holds the first stage and needs the inputs; give them as in step(x, ...)")
        by_name = {name: microbatches(value, count, name, gradients) for name, value in given.options.items()}
        kwargs = [{name: parts[number] for name, parts in by_name.items()} for number in range(count)]
        targets = microbatches(given.target, count, "target", gradients if last else None)
        shares = shares_of([size(own) or 1 for own in inputs])
        if not (learn and last):
            return Batch(inputs, shares, kwargs, [None] * count)
        return Batch(inputs, shares, kwargs, list(map(WeightedTarget, targets, self._weights(targets))))

    def _check_options(self, options: dict[str, Any]) -> None:
        for name, value in options.items():
            if self._accepted is not None and name not in self._accepted:
                raise PipelineError(
                    f"{name}={shown(value)}: no block accepts it; give target=... for the loss, or keyword "
                    f"arguments of the blocks' forward ({', '.join(self._accepted)})"
                )

    def _weights(self, targets: list[Any]) -> Sequence[float | None]:
        """The weight of each microbatch's loss: 1 if losses are sums, its share of the samples if they are means.

        None if the targets do not tell how many samples there are: the inputs do, which the first stage's rank has."""
        if self._loss_reduction == "sum":
            return [1.0] * len(targets)
        sizes = list(map(size, targets))
        return shares_of(sizes) if all(sizes) else [None] * len(targets)

    def _finish(self, executor: Executor, batch: Callable[[], Batch]) -> Result:
        """Run a step, and agree with all ranks on how it went: return its result, or raise."""
        self._ended = (  # until all have agreed
            f"rank {self.rank} has broken off an earlier step of this pipeline, which other ranks may still be in; "
            f"start the job again"
        )
        outcome = _executed(executor, batch)
        self.trace = outcome.trace
        losses = [loss for _, loss in sorted(outcome.losses.items())]
        mine = total_loss(losses)
        failures = [] if outcome.failure is None else [str(outcome.failure)]
        news: Tensor | Literal[True] | None = mine if mine is None or self._streams.on_host else True
        agreed = end_of_step(self._circles, failures, news)
        if agreed.failures:
            text = "\n".join(agreed.failures)
            lost = f"this pipeline has lost a rank in an earlier step, start the job again: {text}"
            self._ended = lost if agreed.lost else None
            raise PipelineError(text) from outcome.error
        outputs = tuple(output for _, output in sorted(outcome.outputs.items()))
        loss = self._loss_path.share(mine) if agreed.loss is True else agreed.loss
        self._ended = None
        return Result(loss if mine is None else mine, outputs, tuple(each.value for each in losses))

    def _check_going(self) -> None:
        if self._ended is not None:
            raise PipelineError(self._ended)


def _chain(blocks: list[Block], casts: StageCasts) -> Chain:
    return Chain([block.module for block in blocks], casts)


def _executed(executor: Executor, batch: Callable[[], Batch]) -> Outcome:
    """Make and run a batch. If the batch is wrong on this rank, all ranks are told at the end of the step."""
    try:
        try:
            ready = batch()
        except Exception as error:
            return executor.refuse(error)
        return executor.run(ready)
    except RetrogradeError as error:
        return executor.lost(error)


def _itself(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise PipelineError(f"the model returns a {type(output).__name__}; give loss=... to make a number of it")
    return output


def _names(blocks: list[Block]) -> Iterator[tuple[str, nn.Parameter]]:
    seen: set[int] = set()
    for block in blocks:
        for name, parameter in block.module.named_parameters(prefix=block.name):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter
