"""A page: the memory in which a unit's parameters are whole, and its life.

[Note: the life of a page]

    a page that comes and goes:    ABSENT ── load ──> LOADING ── finish ──> READY ── drop ──> ABSENT
                                                        ^                     │
                                                        └──── load again ─────┘   (it is stale)

    where shards show in it:       ABSENT ── load ──> LOADING ── finish ──> LIVE ── drop ──> ABSENT
                                                        ^                     │
                                                        │                     │ keep (before weights change)
                                                        │                     v
                                                        └── load again ───  READY ── drop ──> ABSENT

    a page that stays:             ABSENT ── load ──> LOADING ── finish ──> AT_HOME
                                                        ^                     │
                                                        └──── load again ─────┘

A page that stays (stages 1 and 2, or one rank) has the shard inside it. A page is stale after a step, or an edit.

LIVE is a page that has no memory of its own, or not for all of it: other ranks' shards show in it, and this rank's
(transport/mapped/mirror.py). It is right until somebody may write to them. What is written to it is this rank's own.
Such a page comes and goes at all stages.

The full tensors that users hold are permanent; what changes is the memory behind them. They show the page while it is
READY, LIVE or AT_HOME, and a stub of one element while it is ABSENT. While a page that somebody holds is loaded again
they go on showing it.

Rule 1: a page is dropped only when nothing but the page itself refers to its memory; whoever holds a full tensor or a
        view of one keeps it. Saved tensors do not count: they are handles (saved_tensors.py).
Rule 2: only the functions below change the state. A transition that is not in the drawing raises.
Rule 3: when weights may change anywhere, no page is LIVE (`Pager.let_go`).
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch

from retrograde.devices import Event, Streams
from retrograde.labels import labelled
from retrograde.layout import Layout
from retrograde.ledger import Activity
from retrograde.pages.full_tensor import FullTensor
from retrograde.pages.pool import BufferPool
from retrograde.torch_internals import held_elsewhere, set_data, storage_id, storage_users, version_of
from retrograde.transport import Mirror, Work


class PageState(Enum):
    ABSENT = auto()
    LOADING = auto()
    READY = auto()
    LIVE = auto()
    AT_HOME = auto()


_NEXT = {
    PageState.ABSENT: {PageState.LOADING},
    PageState.LOADING: {PageState.READY, PageState.LIVE, PageState.AT_HOME},
    PageState.READY: {PageState.LOADING, PageState.ABSENT},
    PageState.LIVE: {PageState.LOADING, PageState.READY, PageState.ABSENT},
    PageState.AT_HOME: {PageState.LOADING},
}


class Edits(NamedTuple):
    """Full tensors that were edited. Those of frozen parameters share the counter of the page itself."""

    slots: list[int]
    of_frozen: bool


NO_EDITS = Edits([], False)

ReadShards = Callable[[torch.Tensor], Work]  # starts reading the other shards into the memory of a page


def fetch_own(memory: torch.Tensor, span: slice, shard: torch.Tensor, streams: Streams) -> None:
    """This rank's part of a page, from where it lies; on the host too."""
    # A view made here would be held by what waits to run.
    streams.fetching.run(lambda: memory[span].copy_(shard, non_blocking=True))
    if shard.device != memory.device:
        streams.crossing.note(streams.fetching)


class Page:
    """The page of one unit on one rank."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        shard: int,
        full_tensors: tuple[FullTensor, ...],
        home: torch.Tensor | None,
        pool: BufferPool,
        mirror: Mirror | None = None,
    ) -> None:
        """`shard`: which of them is this rank's. `home`: the memory of a page that stays, with that shard inside it.
        `mirror`: its memory where shards can show in it; else the pool's."""
        self.state = PageState.ABSENT
        self.home = home is not None
        self.full_tensors = full_tensors
        self._name = name
        self._layout = layout
        self._shard = shard
        self._pool = pool
        self._streams = pool.streams
        self._memory = home
        self._mirror = mirror
        self._counted = 0  # bytes of a mirror that the ledger knows of
        self._own_references = 0
        self._work: Work | None = None
        self._loaded: Event = None
        self._edits_seen: list[int] | None = None  # counters of the full tensors, but while these are being renewed
        nothing = torch.empty((), dtype=layout.dtype, device=pool.streams.device)
        self._stubs = [nothing.expand(slot.shape) for slot in layout.slots]
        self._show(self._stubs)

    # ---- questions
    @property
    def ready(self) -> bool:
        """Do the full tensors show it?"""
        state = self.state
        return state is PageState.READY or state is PageState.LIVE or state is PageState.AT_HOME

    @property
    def live(self) -> bool:
        """May it show what others write from now on?"""
        return self._mirror is not None and self._mirror.shows

    @property
    def loading(self) -> bool:
        return self.state is PageState.LOADING

    @property
    def memory(self) -> torch.Tensor:
        assert self._memory is not None, f"the page of unit {self._name} is absent"
        return self._memory

    @property
    def device(self) -> torch.device:
        return self._streams.device

    @property
    def storage(self) -> int | None:
        """Which memory it has, if any."""
        return None if self._memory is None else storage_id(self._memory)

    @property
    def held(self) -> bool:
        """Does somebody else refer to it? Counts references in Python, autograd and views."""
        if storage_users(self.memory) > self._own_references:
            return True
        return held_elsewhere(self.full_tensors)

    # ---- transitions
    def _check(self, state: PageState) -> None:
        if state not in _NEXT[self.state]:
            now = self.state.name
            raise RuntimeError(f"the page of unit {self._name} cannot become {state.name}: it is {now}")

    def _become(self, state: PageState) -> None:
        self._check(state)
        self.state = state

    def load(self, shard: torch.Tensor, read: ReadShards) -> None:
        """Start making it whole: this rank's shard is copied, the others' are read."""
        self._check(PageState.LOADING)
        self._edits_seen = None  # until it is there: another thread may look meanwhile
        fetching = self._streams.fetching
        with labelled("page-in of", self._name):
            if self._memory is None:
                self._memory = self._take_memory()
                self.count_own_references()  # not when it is ready: a thread that received it may hold views longer
            fetching.wait(self._streams.current().record())  # a step may have written the shard there
            memory = self._memory
            if self._mirror is None and not self.home:
                fetch_own(memory, self._layout.span(self._shard), shard, self._streams)
            self._work = read(memory)
            self._loaded = fetching.record()
        self._become(PageState.LOADING)
        if self._mirror is None:
            nbytes = self._layout.page_bytes - self._layout.bytes_of(self._shard)
            self._pool.ledger.record(Activity.GATHER, self._name, nbytes)

    def _take_memory(self) -> torch.Tensor:
        if self._mirror is not None:
            return self._mirror.page
        memory, free = self._pool.take(self._layout.padded_numel, self._layout.dtype)
        self._streams.fetching.wait(free)
        return memory

    def finish(self) -> None:
        """Wait for it; then the full tensors show it."""
        assert self._work is not None, self._name
        current = self._streams.current()
        current.wait(self._loaded)  # before what the work may have to copy
        with labelled("wait for page of", self._name):
            self._work.wait(current)
        self._work = None
        self._become(self._when_loaded())
        self._show(list(self._layout.views(self.memory)))
        self.outdate()

    def _when_loaded(self) -> PageState:
        if self._mirror is None:
            return PageState.AT_HOME if self.home else PageState.READY
        self._pool.ledger.record(Activity.GATHER, self._name, self._mirror.moved)  # which is known only now
        self._count_memory(self._mirror.own_bytes)
        return PageState.LIVE if self._mirror.shows else PageState.READY

    def keep(self) -> None:
        """Before weights change: it goes on showing what it shows now."""
        assert self._mirror is not None, self._name
        self._mirror.keep()
        self._count_memory(self._mirror.own_bytes)
        if self.state is PageState.LIVE:
            self._become(PageState.READY)  # else it is under way, and finds out

    def drop(self) -> None:
        """Let go of the memory: nobody holds it."""
        self._become(PageState.ABSENT)
        self._show(self._stubs)
        if self._mirror is None:
            self._pool.give(self.memory, self._streams.current().record())
        else:
            self._mirror.forget()
            self._count_memory(0)
        self._memory = None
        self._pool.ledger.record(Activity.DROP, self._name)

    def _count_memory(self, nbytes: int) -> None:
        """That a mirror has of its own."""
        self._pool.ledger.hold(nbytes - self._counted)
        self._counted = nbytes

    def _show(self, memory: Sequence[torch.Tensor]) -> None:
        for full, data in zip(self.full_tensors, memory, strict=True):
            set_data(full, data)  # its place in the autograd graph stays

    def count_own_references(self) -> None:
        """Who refers to the memory now is nobody else. Of a page that stays: its shard, pieces and graph, once made."""
        self._own_references = storage_users(self.memory) + len(self.full_tensors)

    # ---- edits through full tensors
    def outdate(self) -> None:
        """What was saved of the memory so far without a handle is stale, and refused by autograd."""
        self._edits_seen = None  # another thread may look meanwhile
        for full in self.full_tensors:
            torch.autograd.graph.increment_version(full)
        self.note_edits()

    def note_edits(self) -> None:
        """What was edited so far has been written back, or is no edit of a user's."""
        self._edits_seen = self._edit_counters()

    def _edit_counters(self) -> list[int]:
        return [*map(version_of, self.full_tensors), version_of(self.memory)]

    def edits(self) -> Edits:
        """What was edited since that was last noted."""
        seen = self._edits_seen
        if not self.ready or seen is None:
            return NO_EDITS
        now = self._edit_counters()
        slots = [slot for slot in range(len(self.full_tensors)) if now[slot] != seen[slot]]
        return Edits(slots, now[-1] != seen[-1])

    def own_part(self, slot: int) -> torch.Tensor:
        """What this rank owns of a parameter, as it is in the page."""
        place = self._layout.slots[slot]
        return self.memory[place.offset : place.end][self._layout.within(place, self._shard)]
