"""Ranks of a pipeline say how it went, before any of them goes on.

    with together(groups, "Pipeline()") as arguments:    every rank comes here
        ...                                              what may fail on one rank alone
        arguments.append(said("microbatches", 4, 4))     what must be the same on all
                                                         every rank leaves, or every rank raises

`groups` are the pipeline's own ranks and, with ZeRO, the replicas of this rank: what the first group learns is told to
the second, so that in the end all ranks of all replicas know.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from retrograde.arguments import Said, differences
from retrograde.errors import PipelineError

Groups = Sequence[dist.ProcessGroup]


@contextmanager
def together(groups: Groups, what: str) -> Iterator[list[Said]]:
    """What is raised inside on one rank becomes an error on all; so do arguments that differ."""
    arguments: list[Said] = []
    try:
        yield arguments
    except Exception as error:
        _agree(groups, what, arguments, f"rank {dist.get_rank(groups[0])}: {what} raised {error}")
        raise
    failure = _agree(groups, what, arguments, "")
    if failure:
        raise PipelineError(failure)


def _agree(groups: Groups, what: str, arguments: list[Said], failure: str) -> str:
    """The first failure of any rank; an empty text if there is none. Every rank comes through all of its groups."""
    for group in groups:
        reports = [json.loads(text) for text in all_gather_text(json.dumps([failure, arguments]), group)]
        failure = next((theirs for theirs, _ in reports if theirs), "")
        if not failure:
            different = differences([[Said(*one) for one in theirs] for _, theirs in reports])
            if different:
                failure = f"{what} has different arguments: {different}; give the same on every rank"
    return failure


def all_gather_text(text: str, group: dist.ProcessGroup) -> list[str]:
    """The texts of all ranks of a group."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8)
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    longest = max(int(size) for size in sizes)
    if not longest:
        return [""] * world
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    everybody = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(everybody, padded, group=group)
    return [bytes(theirs[: int(size)].tolist()).decode() for theirs, size in zip(everybody, sizes, strict=True)]
