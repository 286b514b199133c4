"""What the agreed sequence is made of: small values that are equal on all ranks, and that travel as they are.

A *want* is a collective that a rank's program asks for. A *boundary* is where all ranks have come together.
"""

from typing import Annotated

from msgspec import Meta

from retrograde.transport.records import Count, Record

MOST_USES = 4096  # bytes; four parameters a byte where two bits say what a parameter's gradient is for


class Gather(Record, frozen=True, tag="gather"):
    """The want of a unit's page."""

    unit: Count

    def __str__(self) -> str:
        return f"the gather of unit {self.unit}"


class Reduce(Record, frozen=True, tag="reduce"):
    """The want of the sum of a unit's gradients over all ranks.

    `uses`: what each parameter's gradient is for, as the caller writes it. The order compares it and carries it. Ranks
    that reduce a unit for different uses want different things.
    """

    unit: Count
    uses: Annotated[bytes, Meta(max_length=MOST_USES)] = b""

    def __str__(self) -> str:
        return f"the reduction of unit {self.unit}"


class HardStep(Record, frozen=True, tag="step"):
    """Shards change: whatever was gathered before is stale."""

    def __str__(self) -> str:
        return "a step"


class SoftStep(Record, frozen=True, tag="soft"):
    """Ranks come together and no shard changes: a meeting, or the end of a detour."""

    def __str__(self) -> str:
        return "a meeting"


Want = Gather | Reduce
Boundary = HardStep | SoftStep
SequenceEntry = Gather | Reduce | HardStep | SoftStep

STEP = HardStep()
SOFT_STEP = SoftStep()
