"""A unit: the parameters that are gathered and reduced together, with their shard and their page on this rank.

Rule 1: a page is valid while the leaves' version counters are those it was read at.
Rule 2: an edit of a full tensor is written back to the shard, by whoever notices it first: the full tensor itself
        (full_tensor.py), or the next look at the counters (`write_back_edits`).
Rule 3: a graph that has a full tensor or a view of one without a handle asks the full tensor's version counter, which
        is that of all tensors that show the parameter. So that counter moves once for each change of the leaf, and
        only then: not when the page is loaded again for the sake of another parameter.
"""

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from retrograde.devices import Stream
from retrograde.layout import Grid, Layout
from retrograde.pages.edit_log import EditLog
from retrograde.pages.full_tensor import FullTensor
from retrograde.pages.page import Page
from retrograde.pages.pool import BufferPool
from retrograde.pages.source import CastCopy, masters_after_edit
from retrograde.torch_internals import has_hooks, version_of, without_torch_function
from retrograde.transport import Work


class Coherence(Protocol):
    """What pages need of the other ranks: their shards as this rank sees them now, and leave to write."""

    def read(self, unit: "Unit", page: torch.Tensor, alone: bool) -> Work:
        """Start reading the shards that this rank does not hold into the memory of a page. `alone`: the others have no
        reason to read them too."""

    def take_part(self, unit: "Unit") -> None:
        """Take part in reading a page that this rank still has: the others may be reading it."""

    def read_masters(self, unit: "Unit", flat: torch.Tensor) -> Work:
        """Start reading the masters that this rank does not hold, of which no page is made, into a tensor in the unit's
        layout. This rank may do so alone."""

    def writing(self, what: str, unit: "Unit", slot: int) -> AbstractContextManager[None]:
        """Guard an edit inside of a parameter's piece in place: no other rank reads what it was before."""

    def editing(self, what: str, unit: "Unit", slot: int) -> AbstractContextManager[None]:
        """Guard an edit inside of a parameter's full tensor, which shows the page as it is now:
        no other rank reads what it was before."""


# A page outlives an inference_mode() in which it may be made.
_for_all_modes = torch.inference_mode(mode=False)


class Unit:
    """One unit on one rank."""

    def __init__(
        self,
        index: int,
        name: str,
        layout: Layout,
        leaves: Sequence[nn.Parameter],
        memory: torch.Tensor,
        grid: Grid,
        pool: BufferPool,
        coherence: Coherence,
        masters: torch.Tensor | None = None,
    ) -> None:
        """`memory` is the shard, or the whole page with the shard inside it when pages stay (or there is one shard).
        With `masters`, these are the shard, in another dtype or elsewhere, and `memory` is their source (source.py)."""
        self.index = index
        self.name = name
        self.layout = layout
        self.grid = grid
        self.rank = grid.shard  # among those that hold the unit together; `grid.rank` is its number among all
        self.leaves = tuple(leaves)
        self.trained = [leaf.requires_grad for leaf in leaves]  # kept by the leaves (parameters/leaf.py)
        # Plain tensors that share the leaves' memory and version counters: reading a leaf itself is slower.
        self.pieces = tuple(leaf.detach() for leaf in leaves)
        self.edits = EditLog()
        # Slots that Engine.full_params holds.
        self.whole_leaves: set[int] = set()  # where the leaf is its full tensor
        self.edited_alone: set[int] = set()  # where one rank's edits are to be everybody's
        self.version_at_rest = self.version  # when the weights last were as all ranks know (coordination/fences.py)
        self.frozen_handles: weakref.WeakSet[object] = weakref.WeakSet()  # of frozen parameters, in graphs
        self._streams = pool.streams
        at_home = memory.numel() == layout.padded_numel and memory.device == self._streams.device
        own = memory[layout.span(self.rank)] if at_home else memory
        self.shard = own if masters is None else masters
        self.leaves_on_host = self.shard.device != self._streams.device  # in its memory, and the page on a device
        self._cast = None if masters is None else CastCopy(masters, own, self._streams)
        self.source_on_host = own.device != self._streams.device
        self.page = Page(name, layout, self.rank, self._full_tensors(), memory if at_home else None, pool)
        self._coherence = coherence
        self._read_at: int | None = None  # the leaves' version that the page has, once it was read
        self._graphs_know = list(map(version_of, self.pieces))  # changes up to here have made older graphs stale

    def _full_tensors(self) -> tuple[FullTensor, ...]:
        """Make the full tensors, each with a version counter of its own. The page gives them memory."""
        made = []
        for index, slot in enumerate(self.layout.slots):
            stub = torch.empty((), dtype=self.layout.dtype, device=self._streams.device)
            made.append(FullTensor.of(stub.expand(slot.shape), self, index))
        return tuple(made)

    # ---- questions
    @property
    def version(self) -> int:
        """A number that moves with every change of a leaf."""
        return sum(map(version_of, self.pieces))

    @property
    def stays(self) -> bool:
        """Is the shard part of the page, which is never dropped?"""
        return self.page.home

    @property
    def valid(self) -> bool:
        """Has the page, or will it have when it is loaded, the weights as this rank sees them now?"""
        return (self.page.ready or self.page.loading) and self._read_at == self.version

    @property
    def source(self) -> torch.Tensor:
        """The shard as it is now, in the page's dtype: what pages are made of, here and on other ranks."""
        return self.shard if self._cast is None else self._cast.at(self.version)

    @property
    def source_is_current(self) -> bool:
        """Is the source as the masters are, so that `source` has nothing to do?"""
        return self._cast is None or self._cast.is_at(self.version)

    @property
    def has_masters(self) -> bool:
        """Are the leaves of another dtype than the page?"""
        return self.shard.dtype != self.layout.dtype

    @property
    def source_bytes(self) -> int:
        """How many bytes the source takes besides the shard and pages."""
        return 0 if self._cast is None or self.stays else self.layout.shard_bytes

    @property
    def hooked(self) -> bool:
        """Does somebody wait for the gradients of this unit in the backward that brings them?"""
        return True in self.hooked_slots()

    def hooked_slots(self) -> list[bool]:
        """Which leaves have hooks. Asked at every step, so the leaves' class is not asked what that means."""
        with without_torch_function():
            return list(map(has_hooks, self.leaves))

    def flat(self) -> torch.Tensor:
        """The shard as the graph has it: on the device. Where that has no such memory, a tensor without any."""
        if not self.leaves_on_host:
            return self.shard.detach()
        return torch.empty((), dtype=self.shard.dtype, device=self._streams.device).expand(self.shard.shape)

    def await_gradients(self) -> None:
        """Wait until no gradient is on its way to the host, which is about to read or write them."""
        self._streams.crossing.await_returned()

    def full(self, slot: int) -> FullTensor:
        """The full tensor of a parameter; the page is ready."""
        if self.trained[slot]:
            return self.page.full_tensors[slot]
        return self.outside_graph(slot)

    def outside_graph(self, slot: int) -> FullTensor:
        """The full tensor of a parameter in no graph: another tensor, of the same memory and version counter."""
        return FullTensor.of(self.page.full_tensors[slot], self, slot)

    # ---- the page's life
    @_for_all_modes
    def load(self, alone: bool = False) -> None:
        """Begin paging in what is absent or stale. `alone`: only this rank has a reason to."""
        if self.page.loading:
            self.page.finish()
        self._read_at = self.version
        _ = self.source  # it is made, if need be, before the page waits for what was issued here
        self.page.load(lambda memory: self._coherence.read(self, memory, alone))

    def fetch_own(self, page: torch.Tensor) -> None:
        """Copy this rank's part of a page from where it lies, which may be on the host."""
        if self.stays:
            return
        source, span = self.source, self.layout.span(self.rank)
        # A view made here would be held by what waits to run.
        self._streams.fetching.run(lambda: page[span].copy_(source, non_blocking=True))
        if self.source_on_host:
            self._streams.crossing.note(self._streams.fetching)

    def take_part(self) -> None:
        """Take part in the others' reading of a page that is here because somebody holds it."""
        self._coherence.take_part(self)

    @_for_all_modes
    def finish_loading(self) -> None:
        self.page.finish()
        self.outdate(range(len(self.leaves)))

    @_for_all_modes
    def whole_masters(self) -> torch.Tensor:
        """The masters of all ranks that hold the unit together, in its layout."""
        layout = self.layout
        stream = self._streams.current()
        flat = stream.empty(layout.padded_numel, self.shard.dtype)
        flat[layout.span(self.rank)].copy_(self.shard)
        self._coherence.read_masters(self, flat).wait(stream)
        return flat

    def drop_unless_held(self) -> bool:
        """Let go of the page if it is ready, does not stay, and nobody else refers to it. Returns whether it did."""
        if not self.page.ready or self.stays:
            return False
        self.write_back_edits()
        if self.page.held:
            return False
        self.page.drop()
        return True

    # ---- graphs
    def outdate(self, slots: Iterable[int]) -> None:
        """Make stale what graphs have of these parameters without a handle, of those that have changed (Rule 3)."""
        versions = {slot: version_of(self.pieces[slot]) for slot in slots}
        changed = [slot for slot, version in versions.items() if version != self._graphs_know[slot]]
        if not changed:
            return
        for slot in changed:
            self._graphs_know[slot] = versions[slot]
        self.page.outdate(changed)

    def note_change_of_shards(self) -> None:
        """Note that shards have changed under the page, as by a step. What the page has is old and no edit, even where
        a counter has moved: a parameter that was made of a full tensor's memory shares its counter."""
        self.outdate(range(len(self.leaves)))
        if self.page.ready:
            self.page.note_edits()

    # ---- edits through full tensors
    def write_back_edits(self) -> None:
        """Write back edits that were not reported (through an alias of a full tensor)."""
        slots = [slot for slot in self.page.edits() if slot not in self.edited_alone]
        if not slots:
            return
        self.page.note_edits()  # a fence looks for edits too
        for slot in slots:
            with self._coherence.writing(f"an edit of {self.layout.slots[slot].name}", self, slot):
                self.write_back(slot)

    def write_back(self, slot: int) -> None:
        """Write this rank's part of a full tensor that was edited into the shard. The page stays valid."""
        piece, edited, before = self.pieces[slot], self.page.own_part(slot), self.version
        if self.leaves_on_host:
            edited = self._streams.current().to_host(edited)
        # Where the page stays both are the same memory: nothing is copied, and the version moves all the same.
        piece.copy_(masters_after_edit(piece, edited) if self.has_masters else edited)
        self._read_at = self.version
        self._graphs_know[slot] = version_of(piece)  # by the full tensor's own counter, which the edit has moved
        if self._cast is not None and self.stays:
            self._cast.keep_up(before, self.version)  # which is part of the page
        self.page.note_edits()

    def editing(self, what: str, slot: int) -> AbstractContextManager[None]:
        """Guard an edit inside of a full tensor, which is reported, and write it back at the end."""
        if slot in self.edited_alone:
            return contextlib.nullcontext()
        return self._coherence.editing(f"{what} on {self.layout.slots[slot].name}", self, slot)

    def end_editing_alone(self) -> None:
        """End a span in which one rank edits for all. What this rank has made of its page meanwhile is not written
        back: another value is about to come."""
        if self.edited_alone:
            self.edited_alone = set()
            self.page.note_edits()

    def stray_edit(self) -> str | None:
        """The name of a parameter whose shard was written to through its full tensor by a function that does not tell
        (`torch._foreach_mul_`, `out=`), and has not passed a fence since. Where the page is the shard's home there is
        nothing left of the values before."""
        if not self.stays:
            return None
        stray = [slot for slot in self.page.edits() if not self.edits.has(slot)]
        return self.layout.slots[stray[0]].name if stray else None

    def shard_after(self, edits: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """A copy, made on `stream` in this dtype, of the shard as it was after so many edits. What was edited since, or
        is being edited now, is not read."""
        if self.leaves_on_host:
            stream = Stream()
        old = stream.empty(self.shard.numel(), dtype)
        before = dict(self.edits.later_than(edits))

        def copy() -> None:
            old.zero_()
            for index, slot in enumerate(self.layout.slots):
                place = self.layout.piece(slot, self.rank)
                old[place] = before.get(index, self.shard[place])

        stream.run(copy)
        return old
