"""Ranks of a pipeline tell each other whether they have failed, before any of them goes on.

    with together(transports, "Pipeline()") as arguments:    every rank comes here
        ...                                                  what may fail on one rank alone
        arguments.append(said("microbatches", 4, 4))         what must be the same on all
                                                             every rank leaves, or every rank raises

`transports` go to the pipeline's own ranks and, with ZeRO, to the replicas of this rank. The ranks meet over one after
the other and tell the second circle what the first has learned, so that in the end all ranks of all replicas know.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from torch import Tensor

from retrograde.arguments import Said, differences
from retrograde.errors import PipelineError, RetrogradeError
from retrograde.pipeline.connecting import Circle
from retrograde.transport import Transport
from retrograde.transport.values import exchange


@contextmanager
def together(transports: Sequence[Transport], what: str) -> Iterator[list[Said]]:
    """Raise an error on all ranks if one rank raises inside, or if the arguments differ."""
    arguments: list[Said] = []
    try:
        yield arguments
    except Exception as error:
        _agree(transports, what, arguments, f"rank {transports[0].rank}: {what} raised {error}")
        raise
    failure = _agree(transports, what, arguments, "")
    if failure:
        raise PipelineError(failure)


def _agree(transports: Sequence[Transport], what: str, arguments: list[Said], failure: str) -> str:
    """Tell all ranks of `failure`; return the first failure of any rank, or "". Every rank comes to all meetings."""
    for transport in transports:
        words = [list(one) for one in arguments]
        reports = exchange(transport, what, (failure, words))
        failure = next((theirs for theirs, _ in reports if theirs), "")
        if not failure:
            different = differences([[Said(*one) for one in theirs] for _, theirs in reports])
            if different:
                failure = f"{what} has different arguments: {different}; give the same on every rank"
    return failure


class Agreed(NamedTuple):
    """What all ranks know at the end of a step: the failures of all of them, and the loss if the last stage has one.

    `loss`: True if the loss is on a device, and comes by another way (loss_path.py). `lost`: some rank is gone, and
    there will be no other step."""

    failures: list[str]
    loss: Tensor | Literal[True] | None
    lost: bool


def end_of_step(
    circles: Sequence[Circle],
    failures: list[str],
    loss: Tensor | Literal[True] | None,
) -> Agreed:
    """Meet at the end of a step: the rank of the last stage tells the loss, and ranks that have failed tell why.

    If one circle cannot meet, because a rank of it is gone, the other still does, so that all ranks know of it.
    """
    told = None
    lost = False
    for circle in circles:
        own = loss if circle is circles[0] else None  # replicas have losses of their own
        try:
            everyone = exchange(circle.transport, "the end of a step", (failures, own, lost))
        except RetrogradeError as error:
            failures = sorted({*failures, str(error)})
            lost = True
            continue
        failures = sorted({text for theirs, _, _ in everyone for text in theirs})
        told = next((theirs for _, theirs, _ in everyone if theirs is not None), told)
        lost = lost or any(theirs for _, _, theirs in everyone)
    return Agreed(failures, told, lost)
