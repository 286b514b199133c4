"""A microbatch that W computes again, where its pairs would take more memory than there is for them.

[Note: pairs or inputs]
Between I and W a stage holds pairs, or else what they can be made of again: its input and the gradient of its output. W
then runs F of the microbatch once more, and a backward in which nothing needs to wait.

Rule 1: that backward adds to the gradients that waited the first time and to no others, which have theirs already. To
        plain parameters it adds as an unsplit backward would. A full tensor is no leaf, and its parameter shares a node
        with others that may not have waited: its gradients wait as pairs until that backward has ended.
Rule 2: the same numbers come out: random numbers and autocast are those of F, and the stage's input is unchanged.
Rule 3: what cannot be repeated keeps its pairs: a stage that changes its input or buffers in forward, whose input needs
        no gradient (the first stage), or in which somebody runs a backward of their own (reentrant checkpoints do).
Rule 4: without a limit nothing is prepared for that where the stage's last I has computed no activations again. If the
        next one does, since checkpoints were switched on, microbatches whose F came before it keep their pairs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from retrograde.pipeline.split import SplitBackward, Waited
from retrograde.torch_internals import version_of


@dataclass
class Pending:
    """The pairs that a rank holds between I and W, over all its stages, and how many bytes of them it may hold.

    Without a limit that depends on the microbatch. Where I had to compute activations again, somebody has chosen memory
    over time: then those of one microbatch in each stage. Else as many as there are."""

    limit: float | None = None
    stages: int = 1  # that share this
    held: int = 0

    def has_room(self, nbytes: int, recomputed: bool) -> bool:
        if self.limit is not None:
            return self.held + nbytes <= self.limit
        return not recomputed or self.held + nbytes <= self.stages * nbytes

    def may_lack_room(self, recomputes: bool | None) -> bool:
        """Asked in F, of a stage whose last I has computed activations again, or has not; None: there was none."""
        return recomputes is not False if self.limit is None else self.limit < math.inf


@dataclass(frozen=True)
class Surroundings:
    """What a forward depends on beside its arguments, when it began."""

    device: torch.device
    random: Tensor  # the host's generator
    random_of_device: Tensor | None
    lower: bool
    dtype: torch.dtype

    @staticmethod
    def now(device: torch.device) -> "Surroundings":
        of_device = None
        if device.type != "cpu":
            of_device = torch.get_device_module(device).get_rng_state(device)
        kind = device.type
        return Surroundings(
            device, torch.get_rng_state(), of_device, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, random numbers and autocast are as they were; after it, as they are now."""
        devices = [] if self.random_of_device is None else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type):
            torch.set_rng_state(self.random)
            if self.random_of_device is not None:
                torch.get_device_module(self.device).set_rng_state(self.random_of_device, self.device)
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.lower):
                yield


class Recomputed(NamedTuple):
    """What running a forward again has brought."""

    leaves: list[Tensor]
    outputs: list[GradientEdge | None]


@dataclass
class Repeat:
    """What F and I of a microbatch need to run once more."""

    inputs: list[Tensor]  # those that need gradients
    forward: Callable[[SplitBackward], Recomputed]
    surroundings: Surroundings
    waited: Waited = field(default_factory=Waited)
    grads: Sequence[Tensor | None] = ()

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.inputs, *self.grads) if t is not None)

    def run(self, split: SplitBackward) -> None:
        """F, and I and W at once."""
        with self.surroundings.again(), torch.enable_grad():
            made = self.forward(split)
        pairs = [(e, g) for e, g in zip(made.outputs, self.grads, strict=True) if e is not None and g is not None]
        split.run_again([e for e, _ in pairs], [g for _, g in pairs], made.leaves, self.waited)
        for leaf in made.leaves:
            leaf.grad = None


class Writes:
    """Whether a forward writes to its inputs or to a buffer, as batch norms do."""

    def __init__(self, watched: list[Tensor]) -> None:
        self._watched = watched
        self._before = list(map(version_of, watched))

    @staticmethod
    def watch(module: nn.Module, inputs: Sequence[Tensor | None]) -> "Writes":
        return Writes([*module.buffers(), *(t for t in inputs if t is not None)])

    @property
    def happened(self) -> bool:
        """Asked once, when the forward is over."""
        now = list(map(version_of, self._watched))
        self._watched = []
        return now != self._before
