"""Ranks of a pipeline say how it went, before any of them goes on.

    with together(transports, "Pipeline()") as arguments:    every rank comes here
        ...                                                  what may fail on one rank alone
        arguments.append(said("microbatches", 4, 4))         what must be the same on all
                                                             every rank leaves, or every rank raises

`transports` go to the pipeline's own ranks and, with ZeRO, to the replicas of this rank: what the first learns is told
to the second, so that in the end all ranks of all replicas know.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from retrograde.arguments import Said, differences
from retrograde.errors import PipelineError
from retrograde.transport import Position, Reason, Transport, Value

V = TypeVar("V", bound=Value)


@contextmanager
def together(transports: Sequence[Transport], what: str) -> Iterator[list[Said]]:
    """What is raised inside on one rank becomes an error on all; so do arguments that differ."""
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
    """The first failure of any rank; an empty text if there is none. Every rank comes to all of its meetings."""
    for transport in transports:
        words = [list(one) for one in arguments]
        reports = exchange(transport, what, (failure, words))
        failure = next((theirs for theirs, _ in reports if theirs), "")
        if not failure:
            different = differences([[Said(*one) for one in theirs] for _, theirs in reports])
            if different:
                failure = f"{what} has different arguments: {different}; give the same on every rank"
    return failure


def exchange(transport: Transport, label: str, value: V) -> list[V]:
    """Everybody's value, by rank."""
    positions = transport.meet(Position(Reason.VALUE, label, {}, {}, value))
    return [position.value for position in positions]  # type: ignore[misc]
