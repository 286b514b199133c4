"""Runs one rank's part of a schedule: a loop over its actions, and a table from action kinds to methods.

[Note: a failure]
When an action raises, the rank does not stop: it goes through the rest of its schedule without computing, sends
void messages in place of results and takes in what it was to receive. A rank that receives a void message does the
same. So every rank comes to the end of the step, where all of them agree (pipeline.py) and raise one error.
"""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from retrograde.errors import PipelineError
from retrograde.labels import PREFIX, labelled_as
from retrograde.pipeline.payload import Payload
from retrograde.pipeline.schedule import Action, ActionKind, Schedule
from retrograde.pipeline.stage import Stage, WeightedLoss, WeightedTarget
from retrograde.pipeline.timeline import Timed
from retrograde.pipeline.transport import ReceiveContent, SenderFailed, StageTransport, Unreadable
from retrograde.transport.messages import Address

# Labels of actions in a profiler.
LABELS = {
    ActionKind.F: "forward",
    ActionKind.I: "backward of inputs",
    ActionKind.W: "backward of weights",
    ActionKind.B: "backward",
    ActionKind.SEND_F: "send output",
    ActionKind.RECV_F: "receive input",
    ActionKind.SEND_B: "send input gradient",
    ActionKind.RECV_B: "receive output gradient",
    ActionKind.GATHER: "gather weights",
    ActionKind.DROP: "drop weights",
    ActionKind.REDUCE: "reduce gradients",
}


def label_of(action: Action) -> str:
    """The name of an action in a profile: `retrograde: forward, stage 1, microbatch 2`."""
    label = f"{PREFIX}{LABELS[action.kind]}, stage {action.stage}"
    return label if action.microbatch is None else f"{label}, microbatch {action.microbatch}"


@dataclass(frozen=True)
class Batch:
    """One step's data on this rank, by microbatch. The first stage uses `inputs` and `shares`, the last `targets`.

    `shares`: of the samples of the step, what each microbatch is."""

    inputs: Sequence[Any]
    shares: Sequence[float]
    options: Sequence[Mapping[str, Any]]
    targets: Sequence[WeightedTarget | None]
    keep_outputs: bool = False


@dataclass(frozen=True)
class Failure:
    """What went wrong first on this rank, and in which action (None: before the first)."""

    rank: int
    action: Action | None
    text: str

    def __str__(self) -> str:
        if self.action is None:
            return f"rank {self.rank}: {self.text}"
        place = f"rank {self.rank}, stage {self.action.stage}"
        if self.action.microbatch is not None:
            place += f", microbatch {self.action.microbatch}"
        return f"{place}, action {self.action}: {self.text}"


@dataclass
class Outcome:
    """The results of one rank's part of a step, or its failure."""

    losses: dict[int, WeightedLoss] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    failure: Failure | None = None
    error: Exception | None = None  # on the rank that failed
    void: bool = False  # this rank, or one it depends on, has failed
    trace: list[Timed] = field(default_factory=list)


class Executor:
    """Runs one rank's actions of a lowered schedule, with transfers among them, and calls `watch` after each."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        transport: StageTransport,
        watch: Callable[[Action], None] | None = None,
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self.stages = stages
        self.watch = watch
        self._transport = transport
        self._actions = schedule.ranks[rank]
        self._labels = [label_of(action) for action in self._actions]
        self._outcome = Outcome()
        self._arriving: dict[Address, ReceiveContent] = {}
        self._here: dict[Address, Any] = {}  # from another stage of this rank, or to be sent to another rank
        self._table: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.I: self._backward_inputs,
            ActionKind.W: self._backward_weights,
            ActionKind.B: self._backward,
            ActionKind.SEND_F: self._send,
            ActionKind.RECV_F: self._receive,
            ActionKind.SEND_B: self._send,
            ActionKind.RECV_B: self._receive,
            ActionKind.GATHER: lambda action: self.stages[action.stage].gather(),
            ActionKind.DROP: lambda action: self.stages[action.stage].drop(),
            ActionKind.REDUCE: self._reduce,
        }
        self._void_table: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._discard,
            ActionKind.I: self._discard,
            ActionKind.B: self._discard,
            ActionKind.SEND_F: self._send_void,
            ActionKind.SEND_B: self._send_void,
            ActionKind.RECV_F: self._receive,
            ActionKind.RECV_B: self._receive,
        }

    def run(self, batch: Batch) -> Outcome:
        """Run all actions of a step. An action that raises does not raise here: the outcome has its failure."""
        self._batch = batch
        outcome = self._play(Outcome())
        del self._batch
        return outcome

    def refuse(self, error: Exception) -> Outcome:
        """Go through a step that cannot start on this rank: the others get void messages, and learn why at the end."""
        text = str(error) if isinstance(error, PipelineError) else _last_line(error)
        return self._play(Outcome(failure=Failure(self.rank, None, text), error=error, void=True))

    def lost(self, error: Exception) -> Outcome:
        """Forget a step that this rank could not go through to its end, since another rank of the pipeline is gone.

        If it had failed here before that, both are said: the first may be why the other rank is gone."""
        was, self._outcome = self._outcome, Outcome()
        self._arriving.clear()
        self._here.clear()
        for stage in self.stages.values():
            stage.clear()
        if was.failure is None:
            return Outcome(failure=Failure(self.rank, None, str(error)), error=error, void=True)
        failure = replace(was.failure, text=f"{was.failure.text}; then: {error}")
        return Outcome(failure=failure, error=was.error, void=True)

    def _play(self, started: Outcome) -> Outcome:
        self._outcome = started
        for action, label in zip(self._actions, self._labels, strict=True):
            with labelled_as(label):
                self._started = time.perf_counter()
                self._do(action)
                self._outcome.trace.append(Timed(self.rank, action, self._started, time.perf_counter()))
            self._tell(action)
        outcome, self._outcome = self._outcome, Outcome()
        self._arriving.clear()
        self._here.clear()
        if outcome.void:
            for stage in self.stages.values():
                stage.clear()
        return outcome

    def _do(self, action: Action) -> None:
        if self._outcome.void:
            self._do_void(action)
            return
        try:
            self._table[action.kind](action)
            return
        except SenderFailed:
            self._outcome.void = True
        except Exception as error:
            self._fail(action, error, _last_line(error))
        if action.kind.is_transfer:
            self._do_void(action)  # compute actions took what arrived for them before they failed

    def _tell(self, action: Action) -> None:
        """Call `watch`. If it raises, the step has failed as if the action had: other ranks wait for this one."""
        if self.watch is None:
            return
        try:
            self.watch(action)
        except Exception as error:
            if self._outcome.failure is None:
                self._fail(action, error, f"the callback given to watch() raised {_last_line(error)}")

    def _fail(self, action: Action, error: Exception, text: str) -> None:
        self._outcome.void = True
        self._outcome.error = error
        self._outcome.failure = Failure(self.rank, action, text)

    def _do_void(self, action: Action) -> None:
        """Do what remains of an action after a failure: discard what it would use, send void messages, receive."""
        instead = self._void_table.get(action.kind)
        if instead is not None:
            instead(action)

    # ---- compute
    def _forward(self, action: Action) -> None:
        number = _number(action)
        stage = self.stages[action.stage]
        if action.stage == 0:
            arrived = Payload.of(self._batch.inputs[number], self._batch.shares[number]).apart()
        else:
            arrived = self._take(Address(True, action.stage - 1, number))
        options = self._batch.options[number]
        if action.stage != self.schedule.last_stage:
            self._hand_over(action, Address(True, action.stage, number), stage.forward(number, arrived, options))
            return
        target = self._batch.targets[number]
        made = stage.forward_last(number, arrived, options, target)
        if self._batch.keep_outputs:
            self._outcome.outputs[number] = made.output
        if made.loss is not None:
            self._outcome.losses[number] = made.loss

    def _backward(self, action: Action) -> None:
        grads = self._arrived_grads(action)
        self._hand_back(action, self.stages[action.stage].backward(_number(action), grads))

    def _backward_inputs(self, action: Action) -> None:
        grads = self._arrived_grads(action)
        self._hand_back(action, self.stages[action.stage].backward_inputs(_number(action), grads))

    def _backward_weights(self, action: Action) -> None:
        self.stages[action.stage].backward_weights(_number(action))

    def _reduce(self, action: Action) -> None:
        """Do nothing: the stage's gradients are reduced when all ranks have agreed that the step succeeded."""

    # ---- what arrives and what leaves
    def _arrived_grads(self, action: Action) -> Any:
        if action.stage == self.schedule.last_stage:
            return None
        return self._take(Address(False, action.stage, _number(action)))

    def _hand_over(self, action: Action, address: Address, payload: Payload) -> None:
        here = self.schedule.placement[action.stage + 1] == self.rank
        self._here[address] = payload.copied() if here else payload

    def _hand_back(self, action: Action, grads: list[Tensor | None]) -> None:
        """Hand gradients back to the stage before, or to the stand-ins of the caller's inputs (batches.py)."""
        number = _number(action)
        if action.stage > 0:
            self._here[Address(False, action.stage - 1, number)] = grads
            return
        for given, grad in zip(Payload.of(self._batch.inputs[number]).tensors, grads, strict=True):
            if given is not None and grad is not None:
                given.grad = grad

    def _take(self, address: Address) -> Any:
        incoming = self._arriving.pop(address, None)
        if incoming is None:
            return self._here.pop(address)
        with labelled_as(PREFIX, "wait for the ", address):
            content = incoming()
        self._started = time.perf_counter()  # the wait for another rank does not count as this action's time
        return content

    def _send(self, action: Action) -> None:
        address = _address(action)
        self._transport.send(self.schedule.peer(action), address, self._here.pop(address))

    def _receive(self, action: Action) -> None:
        address = _address(action)
        self._arriving[address] = self._transport.receive(self.schedule.peer(action), address)

    # ---- after a failure
    def _send_void(self, action: Action) -> None:
        address = _address(action)
        self._here.pop(address, None)
        self._transport.send_void(self.schedule.peer(action), address)

    def _discard(self, action: Action) -> None:
        forward = action.kind is ActionKind.F
        address = Address(forward, action.stage - 1 if forward else action.stage, _number(action))
        self._here.pop(address, None)
        incoming = self._arriving.pop(address, None)
        if incoming is not None:
            try:
                incoming()
            except (SenderFailed, Unreadable):
                return


def _last_line(error: Exception) -> str:
    """The line of a traceback that says what went wrong."""
    return traceback.format_exception_only(error)[-1].strip()


def _number(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


def _address(action: Action) -> Address:
    """The address of a transfer, the same at both ends: it names the stage whose output or output gradient travels."""
    before = action.kind in (ActionKind.RECV_F, ActionKind.SEND_B)
    forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
    return Address(forward, action.stage - 1 if before else action.stage, _number(action))


def total_loss(losses: Sequence[WeightedLoss]) -> Tensor | None:
    """The weighted sum of the losses of microbatches, in their order; None if there are none."""
    result: Tensor | None = None
    for loss in losses:
        share = loss.value * loss.weight
        result = share if result is None else result + share
    return result
