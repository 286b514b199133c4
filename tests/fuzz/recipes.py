"""What a case consists of. Plain data: `repr` of a recipe is Python that makes it again."""

from __future__ import annotations

from dataclasses import dataclass

from retrograde.layout import Precision

# Kinds of blocks (models.py says what they are).
KINDS = ("linear", "mlp", "lora", "frozen", "norm", "scalar", "empty", "unused", "nested", "tied", "twice")

# How a block's activations are recomputed, or its backward nested in another one.
PLAIN, CHECKPOINT, REENTRANT, AGAIN, TILED = "plain", "checkpoint", "reentrant", "again", "tiled"
NESTED = (REENTRANT, AGAIN, TILED)

# What ranks may do each on their own, and what only all of them together.
ALONE = ("backward", "backward", "retained", "two losses", "forwards first", "inputs", "input gradient", "penalty")
ALONE += ("evaluate", "dropped", "raise forward")
ALIKE = ("raise", "assign")


@dataclass(frozen=True)
class Act:
    """Something one rank does between two places where all ranks are. `path`: the blocks it runs, in this order."""

    kind: str
    path: tuple[int, ...] = ()
    remat: str = PLAIN
    at: int = 0  # which block of the path is recomputed, raises or is asked for


@dataclass(frozen=True)
class Touch:
    """Something all ranks do with parameters and gradients (touches.py), with numbers drawn from `seed`."""

    kind: str
    seed: int


@dataclass(frozen=True)
class Phase:
    """Each rank's acts, then what all ranks do together."""

    acts: tuple[tuple[Act, ...], ...]
    window: str | None = None  # "coalesce" or "no_sync"
    budget: int | None = None
    then: tuple[str, ...] = ()
    touches: tuple[Touch, ...] = ()  # between the acts and that

    @property
    def alike(self) -> bool:
        """Do all ranks do the same things?"""
        return all(acts == self.acts[0] for acts in self.acts)

    @property
    def needs_all(self) -> bool:
        return any(act.kind in ALIKE for acts in self.acts for act in acts)

    @property
    def raises(self) -> bool:
        """Does a backward raise? torch keeps a part of what it has computed; windows and stage 1 keep another part.
        Nobody can rely on it, so it is not compared, but zeroed."""
        return any(act.kind == "raise" for acts in self.acts for act in acts)


@dataclass(frozen=True)
class Recipe:
    """`exact`: numbers whose sums do not depend on their order, for ranks that do different things."""

    seed: int
    world: int
    stage: int
    blocks: tuple[str, ...]
    phases: tuple[Phase, ...]
    exact: bool = True
    prefetch: bool = True
    resident: int = 0
    units: str = "blocks"
    hooked: bool = False
    in_backward: bool = False
    replicas: int = 1  # of the sharded model, each on a run of neighbouring ranks
    parts: int = 1  # by which what a backward adds to `.grad` is divided
    whole: str | None = None  # parameters that one rank holds
    precision: str | None = None  # of pages, with masters in fp32; "wide": bf16, with gradients that add up in fp32

    @property
    def dtypes(self) -> Precision:
        if self.precision == "wide":
            return Precision(param="bf16", reduce="fp32", accumulate="fp32")
        return Precision.of(self.precision)

    @property
    def possible(self) -> bool:
        """Some things cannot be done by one rank alone."""
        return all(phase.alike or not phase.needs_all for phase in self.phases)
