"""Lets W compute a microbatch again whose pairs would take more memory than they may.

[Note: pairs or inputs]
Between I and W a stage holds pairs, or else what it can make them of again: its input and the gradient of its output.
In the second case W runs F of the microbatch once more, and a backward in which nothing needs to wait.

Rule 1: that backward adds to the gradients that waited the first time and to no others, which have theirs already. To
        plain parameters it adds as an unsplit backward would. A full tensor is no leaf, and its parameter shares a node
        with others that may not have waited: its gradients wait as pairs until that backward has ended. So do all of
        them if I has added to one that waited, for a use that no mode sees: that part would be added once more.
Rule 2: the same numbers come out: random numbers and autocast are those of F, and the stage's input is unchanged.
Rule 3: a stage keeps its pairs if its forward cannot be repeated: it changes what it is given or buffers, its input
        needs no gradient (the first stage), or a backward runs inside it (reentrant checkpoints do that).
Rule 4: without a limit, F prepares no repeat if the stage's last I has computed no activations again. If the next I
        does, since checkpoints were switched on, microbatches whose F came before it keep their pairs.
"""

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from retrograde.pipeline.split import SplitBackward, Waited
from retrograde.torch_internals import tree_flatten, version_of


@dataclass
class Pending:
    """The pairs that a rank holds between I and W, over all its stages, and how many bytes of them it may hold.

    Without a limit, a stage whose I computes activations again may hold the pairs of about one microbatch, since the
    user has chosen memory over time there. Other stages may hold all their pairs."""

    limit: float | None = None
    stages: int = 1  # how many stages share this object
    held: int = 0

    def has_room(self, nbytes: int, recomputed: bool) -> bool:
        if self.limit is not None:
            return self.held + nbytes <= self.limit
        return not recomputed or self.held + nbytes <= self.stages * nbytes

    def may_lack_room(self, recomputes: bool | None) -> bool:
        """May an I find no room for its pairs? `recomputes`: did the last I recompute activations; None: no I yet."""
        return recomputes is not False if self.limit is None else self.limit < math.inf


class OtherGenerators(NamedTuple):
    """The states of Python's generator and of NumPy's, if that is imported, by which stages may leave out layers."""

    of_python: Any
    of_numpy: Any

    @staticmethod
    def now() -> "OtherGenerators":
        numpy = sys.modules.get("numpy.random")
        return OtherGenerators(random.getstate(), None if numpy is None else numpy.get_state())

    def set(self) -> None:
        random.setstate(self.of_python)
        if self.of_numpy is not None:
            sys.modules["numpy.random"].set_state(self.of_numpy)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, restore the states as they were; afterwards, as they are now."""
        now = OtherGenerators.now()
        self.set()
        try:
            yield
        finally:
            now.set()


@dataclass(frozen=True)
class Surroundings:
    """What a forward depends on beside its arguments, as it was when the forward began."""

    device: torch.device
    random: Tensor  # the state of the host's generator
    random_of_device: Tensor | None
    random_of_others: "OtherGenerators"
    lower: bool
    dtype: torch.dtype

    @staticmethod
    def now(device: torch.device) -> "Surroundings":
        of_device = None
        if device.type != "cpu":
            of_device = torch.get_device_module(device).get_rng_state(device)
        kind = device.type
        lower, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return Surroundings(device, torch.get_rng_state(), of_device, OtherGenerators.now(), lower, dtype)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, restore random numbers and autocast as they were; afterwards, as they are now."""
        devices = [] if self.random_of_device is None else [self.device]
        with self.random_of_others.again(), torch.random.fork_rng(devices, device_type=self.device.type):
            torch.set_rng_state(self.random)
            if self.random_of_device is not None:
                torch.get_device_module(self.device).set_rng_state(self.random_of_device, self.device)
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.lower):
                yield


class Recomputed(NamedTuple):
    """What a repeated forward has made: the leaves of its inputs and the edges of its outputs."""

    leaves: list[Tensor]
    outputs: list[GradientEdge | None]


@dataclass
class Repeat:
    """What F and I of a microbatch need to run once more."""

    inputs: list[Tensor]  # the inputs that need gradients
    forward: Callable[[SplitBackward], Recomputed]
    surroundings: Surroundings
    waited: Waited = field(default_factory=Waited)
    grads: Sequence[Tensor | None] = ()

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in (*self.inputs, *self.grads) if t is not None)

    def run(self, split: SplitBackward) -> None:
        """Run F again, then I and W at once."""
        with self.surroundings.again(), torch.enable_grad():
            made = self.forward(split)
        pairs = [(e, g) for e, g in zip(made.outputs, self.grads, strict=True) if e is not None and g is not None]
        split.run_again([e for e, _ in pairs], [g for _, g in pairs], made.leaves, self.waited)
        for leaf in made.leaves:
            leaf.grad = None


class Writes:
    """Finds out whether a forward writes to what it is given or to a buffer, as batch norms do."""

    def __init__(self, watched: list[Tensor]) -> None:
        self._watched = watched
        self._before = list(map(version_of, watched))

    @staticmethod
    def watch(module: nn.Module, *given: Any) -> "Writes":
        """Watch the buffers of a module, and the tensors in these trees."""
        return Writes([*module.buffers(), *(leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor))])

    @property
    def happened(self) -> bool:
        """Has the forward written to one of them? Ask once, after the forward."""
        now = list(map(version_of, self._watched))
        self._watched = []
        return now != self._before
