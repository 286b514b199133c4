"""How far the order looks ahead, and how long ranks are waited for. All ranks must have the same."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks are waited for, in seconds. Too short costs one-sided transfers, never a wrong result;
    too long costs time."""

    starting: float = 180.0  # for a surprise in the first steps: ranks compile and open their data at their own pace
    surprise: float = 8.0  # for a surprise later on
    least: float = 0.25  # however often waiting for a surprise was in vain
    nudge: float = 2.0  # for a call that somebody needs
    gathering: float = 0.05  # for more nudges, when one has come
    partial: float = 1.0  # until an inner node of the tree says what only some of those below it have said
    offer: float = 2.0  # for the others at the place of an invitation
    limit: float = 600.0  # after which a wait is a failure
    roll_call: float = 2.0  # for answers to it
    starting_steps: int = 3

    def for_surprise(self, steps: int, in_vain: int) -> float:
        """How long others are waited for at a surprise. Each wait in vain halves it: a rank that evaluates alone at
        every step does not wait for long."""
        whole = self.starting if steps < self.starting_steps else self.surprise
        return max(self.least, whole / (1 << min(in_vain, 32)))


@dataclass(frozen=True, slots=True)
class OrderPolicy:
    """How far the order looks ahead and what limits it: numbers that are the same on all ranks."""

    depth: int = 1  # gathers that are issued in advance
    horizon: int = 64  # entries that a rank which leaves issues in advance
    spare: int = 4  # pages that a rank which is late keeps for itself, so that it need not leave
    fan_out: int = 32  # of the tree
    soften_after: int = 64  # one-sided gathers in a period, after which a rank asks for a soft step
    generation: int = 32_768  # entries of W's past that are remembered, and as many before them
    mark: int = 8_192  # entries of a period after which W's past may be cut without a boundary
    most_names: int = 64  # ranks that a message lists; if there are more it says so
    patience: Patience = field(default_factory=Patience)

    @property
    def window(self) -> int:
        """How many entries are searched for gathers to prefetch: reductions lie between them."""
        return 2 * self.depth + 4
