"""What pages are made of where masters are wider than pages, or on the host: the shard as pages need it.

[Note: masters and sources]

    leaf ── is a piece of ──> shard (masters) ── cast once a step ──> source ── read by all ranks ──> page

An optimizer updates the masters. Before anybody reads, the source is made of them, so that it is cast once, by its
owner, and travels in the smaller dtype. With offload masters are in the host's memory and the source on the device,
where pages are, or on the host as well. Where nothing differs the shard is its own source.

Rule 1: the source is as the masters are when anything reads it. The main thread asks `Unit.source`, which compares
        version counters. Other ranks read it where it lies: a step ends with a look at it (coordination/fences.py),
        before they are told that the shards are at rest. Edits since then reach them in a copy.
Rule 2: an edit of a full tensor reaches the masters where it has changed an element. An element that it left alone
        keeps all digits of its master.
"""

import torch

from retrograde.devices import Streams


class CastCopy:
    """A copy of the masters in another dtype, or on the device, which is made again when they have changed."""

    def __init__(self, masters: torch.Tensor, memory: torch.Tensor, streams: Streams) -> None:
        self._streams = streams
        self._masters = masters
        self._memory = memory.data  # with a counter of its own: making it again is no edit of the page it lies in
        self._version: int | None = None  # of the masters that it was made of

    def at(self, version: int) -> torch.Tensor:
        """The copy, as masters are whose counters are at `version`. Only the main thread asks:
        it may have to be made."""
        if not self.is_at(version):
            if self._masters.device == self._memory.device:
                self._streams.crossing.wait_for_copies()  # a page may still be read from it
                self._memory.copy_(self._masters)
            else:
                self._send()
            self._version = version
        return self._memory

    def _send(self) -> None:
        """Copy the masters from the host to the device, while the host goes on.
        They are cast before, so that less travels."""
        memory, sent = self._memory, self._masters
        if sent.dtype != memory.dtype:
            sent = self._streams.crossing.pinned(sent.numel(), memory.dtype).copy_(sent)
        fetching, serving = self._streams.fetching, self._streams.serving
        fetching.wait(self._streams.current().record())  # what was made of it before has been read
        fetching.run(lambda: memory.copy_(sent, non_blocking=True))
        self._streams.crossing.note(fetching)
        serving.wait(fetching.record())

    def keep_up(self, before: int, now: int) -> None:
        """Note that the masters went from one version to another by what was written to the copy itself."""
        if self.is_at(before):
            self._version = now

    def is_at(self, version: int) -> bool:
        return self._version == version


def masters_after_edit(masters: torch.Tensor, edited: torch.Tensor) -> torch.Tensor:
    """The masters after an edit of their copy (Rule 2). A zero that has changed its sign has changed."""
    before = masters.to(edited.dtype)
    changed = (edited != before) | (edited.signbit() != before.signbit())
    return torch.where(changed, edited.to(masters.dtype), masters)
