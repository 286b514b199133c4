"""A page: the memory in which a unit's parameters are whole, and its life.

[Note: the life of a page]

    a page that comes and goes:    ABSENT ── load ──> LOADING ── finish ──> READY ── drop ──> ABSENT
                                                        ^                     │
                                                        └──── load again ─────┘   (it is stale)

    a page that stays:             ABSENT ── load ──> LOADING ── finish ──> AT_HOME
                                                        ^                     │
                                                        └──── load again ─────┘

A page that stays (stages 1 and 2, or one rank) has the shard inside it. A page is stale after a step, or an edit.

The full tensors that users hold are permanent; what changes is the memory behind them. They show the page while it is
READY or AT_HOME, and a stub of one element while it is ABSENT. While a page that somebody holds is loaded again they
go on showing it.

Rule 1: a page is dropped only when nothing but the page itself refers to its memory; whoever holds a full tensor or a
        view of one keeps it. Saved tensors do not count: they are handles (saved_tensors.py).
Rule 2: only the functions below change the state. A transition that is not in the drawing raises.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

import torch

from retrograde.devices import Event
from retrograde.labels import labelled
from retrograde.layout import Layout
from retrograde.ledger import Activity
from retrograde.pages.full_tensor import FullTensor
from retrograde.pages.pool import BufferPool
from retrograde.torch_internals import held_elsewhere, set_data, storage_id, storage_users, version_of
from retrograde.transport import Work


class PageState(Enum):
    """Where a page is in its life: the drawing above."""

    ABSENT = auto()
    LOADING = auto()
    READY = auto()
    AT_HOME = auto()


_NEXT = {
    PageState.ABSENT: {PageState.LOADING},
    PageState.LOADING: {PageState.READY, PageState.AT_HOME},
    PageState.READY: {PageState.LOADING, PageState.ABSENT},
    PageState.AT_HOME: {PageState.LOADING},
}


ReadShards = Callable[[torch.Tensor], Work]  # starts reading all shards into the memory of a page


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
    ) -> None:
        """`shard`: the number of this rank's shard. `home`:
        the memory of a page that stays, with that shard inside it."""
        self.state = PageState.ABSENT
        self.home = home is not None
        self.full_tensors = full_tensors
        self._name = name
        self._layout = layout
        self._shard = shard
        self._pool = pool
        self._streams = pool.streams
        self._memory = home
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
        """Do the full tensors show the page?"""
        return self.state is PageState.READY or self.state is PageState.AT_HOME

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
        """The identity of the page's memory; None if it has none."""
        return None if self._memory is None else storage_id(self._memory)

    @property
    def held(self) -> bool:
        """Does anybody else refer to the page? Counts references in Python, autograd and views."""
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

    def load(self, read: ReadShards) -> None:
        """Start reading all shards into the page."""
        self._check(PageState.LOADING)
        self._edits_seen = None  # until it is there: another thread may look meanwhile
        fetching = self._streams.fetching
        with labelled("page-in of", self._name):
            if self._memory is None:
                self._memory, free = self._pool.take(self._layout.padded_numel, self._layout.dtype)
                fetching.wait(free)
                self.count_own_references()  # not when it is ready: a thread that received it may hold views longer
            fetching.wait(self._streams.current().record())  # a step may have written the shard there
            self._work = read(self._memory)
            self._loaded = fetching.record()
        self._become(PageState.LOADING)
        self._pool.ledger.record(
            Activity.GATHER, self._name, self._layout.page_bytes - self._layout.bytes_of(self._shard)
        )

    def finish(self) -> None:
        """Wait until the page is loaded; then the full tensors show it."""
        assert self._work is not None, self._name
        current = self._streams.current()
        current.wait(self._loaded)  # before what the work may have to copy
        with labelled("wait for page of", self._name):
            self._work.wait(current)
        self._work = None
        self._become(PageState.AT_HOME if self.home else PageState.READY)
        self._show(list(self._layout.views(self.memory)))
        self.note_edits()

    def drop(self) -> None:
        """Let go of the page's memory, which nobody holds."""
        self._become(PageState.ABSENT)
        self._show(self._stubs)
        self._pool.give(self.memory, self._streams.current().record())
        self._memory = None
        self._pool.ledger.record(Activity.DROP, self._name)

    def _show(self, memory: Sequence[torch.Tensor]) -> None:
        for full, data in zip(self.full_tensors, memory, strict=True):
            set_data(full, data)  # its place in the autograd graph stays

    def count_own_references(self) -> None:
        """Count all references that there are to the memory as the page's own. For a page that stays this is called
        when its shard, pieces and graph have been made."""
        self._own_references = storage_users(self.memory) + len(self.full_tensors)

    # ---- edits through full tensors
    def outdate(self, slots: Iterable[int]) -> None:
        """Make what was saved of these full tensors so far without a handle stale: autograd refuses it."""
        seen, self._edits_seen = self._edits_seen, None  # another thread may look meanwhile
        for slot in slots:
            torch.autograd.graph.increment_version(self.full_tensors[slot])
            if seen is not None:
                seen[slot] += 1
        self._edits_seen = seen

    def note_edits(self) -> None:
        """Take all edits so far as known: they have been written back, or are no edits of a user's."""
        self._edits_seen = self._edit_counters()

    def _edit_counters(self) -> list[int]:
        return list(map(version_of, self.full_tensors))

    def edits(self) -> list[int]:
        """The full tensors that were edited since edits were last noted."""
        seen = self._edits_seen
        if not self.ready or seen is None:
            return []
        return [slot for slot, now in enumerate(self._edit_counters()) if now != seen[slot]]

    def own_part(self, slot: int) -> torch.Tensor:
        """What this rank owns of a parameter, as it is in the page."""
        place = self._layout.slots[slot]
        return self.memory[place.offset : place.end][self._layout.within(place, self._shard)]
