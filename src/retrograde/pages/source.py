"""What pages are made of where masters are wider than pages: the shard in the page's dtype.

[Note: masters and sources]

    leaf ── is a piece of ──> shard (masters) ── cast once a step ──> source ── read by all ranks ──> page

An optimizer updates the masters. Before anybody reads, the source is made of them, so that it is cast once, by its
owner, and travels in the smaller dtype. Where both dtypes are the same the shard is its own source.

Rule 1: the source is as the masters are when anything reads it. The main thread asks `Unit.source`, which compares
        version counters. Other ranks read it where it lies: a step ends with a look at it (coordination/fences.py),
        before they are told that the shards are at rest. Edits since then reach them in a copy.
Rule 2: an edit of a full tensor reaches the masters where it has changed an element. An element that it left alone
        keeps all digits of its master.
"""

import torch


class CastCopy:
    """A copy of the masters in another dtype, which is made again when they have changed."""

    def __init__(self, masters: torch.Tensor, memory: torch.Tensor) -> None:
        self._masters = masters
        self._memory = memory.data  # with a counter of its own: making it again is no edit of the page it lies in
        self._version: int | None = None  # of the masters that it was made of

    def at(self, version: int) -> torch.Tensor:
        """The copy, of masters whose counters are at `version`. For the main thread: it may have to be made."""
        if not self.is_at(version):
            self._memory.copy_(self._masters)
            self._version = version
        return self._memory

    def is_at(self, version: int) -> bool:
        return self._version == version


def masters_after_edit(masters: torch.Tensor, edited: torch.Tensor) -> torch.Tensor:
    """What an edit of their copy makes of masters (Rule 2). A zero that has changed its sign has changed."""
    before = masters.to(edited.dtype)
    changed = (edited != before) | (edited.signbit() != before.signbit())
    return torch.where(changed, edited.to(masters.dtype), masters)
