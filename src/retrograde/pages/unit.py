"""A unit: the parameters gathered and reduced together, their shard, their page and their graph.

[Note: the graph of a unit]

    leaf pieces -> Pack -> flat shard -> Gather -> full tensors

Both nodes are made once and live as long as the unit, as AccumulateGrad lives as long as its parameter. The
full tensors are outputs of Gather and are permanent too; what changes is the memory behind them: a page
while it is resident, a stub of one element when it is not (`_point`). So gradients of all uses
of a parameter in one backward, over however many openings of the page, arrive in one input buffer, in the
order in which torch itself would add them, and a unit is reduced once.

Gather has the highest sequence number, so the engine runs it the moment the last gradient has arrived
("this backward needs this page no more"). Pack has the lowest: all Gathers of a backward run before the
first Pack, so reductions are left in flight and collected there.

Rule 1: a page is dropped only when nothing but the unit refers to it; whoever holds a full tensor or a view
        of one keeps it. Saved tensors do not count: they are handles (saved.py).
Rule 2: a page is valid while the leaves' version counters are those it was read at.
"""

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from retrograde.devices import Event
from retrograde.layout import Layout
from retrograde.ledger import Activity
from retrograde.pages.full_tensor import FullTensor, alive, set_data, set_requires_grad
from retrograde.pages.gate import Gate
from retrograde.pages.pool import BufferPool
from retrograde.transport import Reading

AS_SOON_AS_READY = 2**64 - 2
AFTER_ALL_ELSE = 0


class Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: "Unit", *leaves: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.unit = weakref.ref(unit)  # the unit owns its nodes: a strong reference would keep both for ever
        return unit.shard.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        unit = alive(ctx.unit)
        pieces = unit.sink.packed(unit, grad) if grad is not None else [None] * len(unit.leaves)
        unit.arrived = [piece is not None for piece in pieces]
        return (None, *pieces)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, unit: "Unit", flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.unit = weakref.ref(unit)
        return tuple(unit.outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        unit = alive(ctx.unit)
        return None, unit.sink.gathered(unit, grads)


def _captured(unit: "weakref.ref[Unit]", slot: int, pack: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
    """`torch.autograd.grad(loss, module.weight)` takes a gradient in front of Gather, and nothing behind it runs.

    Called for every parameter of the unit that has a gradient, also for those nobody asked for. (If something behind it
    runs, a parameter of this unit was asked for too, and parameters/pieces.py has seen to it.)"""
    behind = grad is None or torch._C._will_engine_execute_node(pack)
    return None if behind else alive(unit).sink.captured(alive(unit), slot, grad)


# A page outlives an inference_mode() in which it may be made.
_for_all_modes = torch.inference_mode(mode=False)


class Unit:
    """One unit on one rank."""

    def __init__(
        self, index: int, name: str, layout: Layout, leaves: Sequence[nn.Parameter], home: torch.Tensor, rank: int
    ) -> None:
        """`home` is the shard, or the whole page with the shard inside it when pages stay (or world is 1)."""
        self.index, self.name, self.layout, self.rank = index, name, layout, rank
        self.leaves = tuple(leaves)
        self.trained = [leaf.requires_grad for leaf in leaves]  # kept by the leaves (parameters/pieces.py)
        self.at_home = home.numel() == layout.padded_numel
        self.shard = home[layout.span(rank)] if self.at_home else home
        self.ready = False  # do the full tensors show the page?
        self.buffer: torch.Tensor | None = home if self.at_home else None
        self.arrived = [False] * len(leaves)  # which leaves the last run of Pack had a gradient for
        self.frozen_handles: weakref.WeakSet[Any] = weakref.WeakSet()  # of frozen parameters, in graphs (saved.py)
        self.edits = self.fenced = self._own_references = 0  # edits since a step, and at the last fence (gate.py)
        self.undo: dict[int, torch.Tensor] = {}  # slots edited since then, in order, with their pieces before
        self.reading: Reading | None = None
        self._loaded: Event = None
        self._read_at = -1
        self._edits_seen: list[int] | None = None  # counters of the full tensors, but while these are being renewed
        self._stubs = [torch.empty((), dtype=layout.dtype, device=home.device).expand(s.shape) for s in layout.slots]

    def connect(self, gate: Gate, sink: Any, pool: BufferPool) -> None:
        """`sink` is where gradients go (gradients/flow.py): `gathered` and `packed`."""
        self.gate, self.sink, self._pool, self._streams = gate, sink, pool, pool.streams
        # Plain tensors that share the leaves' memory and version counters: reading a leaf itself is slower.
        self.pieces = tuple(leaf.detach() for leaf in self.leaves)
        self.settled = self.version
        self.outs = tuple(FullTensor.of(stub.clone(), self, i) for i, stub in enumerate(self._stubs))
        if self.layout.dtype.is_floating_point or self.layout.dtype.is_complex:
            with self.accepting(), torch.enable_grad():  # edges for all: a frozen parameter may be unfrozen at any time
                self.flat: torch.Tensor = Pack.apply(self, *self.leaves)  # type: ignore[no-untyped-call]
                Gather.apply(self, self.flat)  # type: ignore[no-untyped-call]
            pack: Any = self.flat.grad_fn
            gather: Any = self.outs[0].grad_fn
            self.accumulators = [node for node, _ in pack.next_functions]
            pack._set_sequence_nr(AFTER_ALL_ELSE)
            gather._set_sequence_nr(AS_SOON_AS_READY)
            for slot, out in enumerate(self.outs):
                cast(Any, torch.Tensor).register_hook(out, partial(_captured, weakref.ref(self), slot, pack))
        self._point(self._stubs)
        if self.at_home:
            self._count_references()

    def _count_references(self) -> None:
        self._own_references = torch._C._storage_Use_Count(self.page.untyped_storage()._cdata) + len(self.outs)

    @property
    def version(self) -> int:
        return sum([piece._version for piece in self.pieces])

    @property
    def hooked(self) -> bool:
        """Does somebody wait for the gradients of this unit in the backward that brings them?"""
        return any(leaf._post_accumulate_grad_hooks or leaf._backward_hooks for leaf in self.leaves)

    @contextlib.contextmanager
    def accepting(self) -> Iterator[None]:
        """Frozen parameters are not, for now: a gradient that was pending before still belongs in `.grad`."""
        frozen = [leaf for leaf, trained in zip(self.leaves, self.trained, strict=True) if not trained]
        for leaf in frozen:
            set_requires_grad(leaf, True)
        try:
            yield
        finally:
            for leaf in frozen:
                set_requires_grad(leaf, False)

    @property
    def valid(self) -> bool:
        return (self.ready or self.reading is not None) and self._read_at == self.version

    @property
    def page(self) -> torch.Tensor:
        assert self.buffer is not None, self.name
        return self.buffer

    # ---- the page's life
    @_for_all_modes
    def start(self) -> None:
        """Begin paging in what is absent or stale."""
        if self.reading is not None:
            self.finish()
        fetching = self._streams.fetching
        if self.buffer is None:
            self.buffer, free = self._pool.take(self.layout.padded_numel, self.layout.dtype)
            fetching.wait(free)
            self._count_references()  # not when the page is ready: a thread that received it may hold views longer
        fetching.wait(self._streams.current().record())  # a step may have written the shard there
        buffer, span = self.buffer, self.layout.span(self.rank)
        if not self.at_home:
            fetching.run(lambda: buffer[span].copy_(self.shard))
        self._read_at = self.version
        self.reading = self.gate.read(self, lambda rank: buffer[self.layout.span(rank)])
        self._loaded = fetching.record()
        self.ready = False
        self._pool.ledger.record(Activity.GATHER, self.name, self.layout.page_bytes - self.layout.shard_bytes)

    @_for_all_modes
    def finish(self) -> None:
        """The page is here: the full tensors show it."""
        assert self.reading is not None, self.name
        self.reading()
        self._streams.current().wait(self._loaded)
        self.reading, self.ready = None, True
        self._point(list(self.layout.views(self.page)))
        self.outdate()

    def outdate(self) -> None:
        """What was saved of the memory so far without a handle is stale, and refused by autograd."""
        self._edits_seen = None  # the service thread may look meanwhile (`stray_edit`)
        for out in self.outs:
            torch.autograd.graph.increment_version(out)
        self._edits_seen = self._edit_counters()

    def drop(self) -> bool:
        """Let go of the page, which is not under way, if nobody else refers to it; says whether it did."""
        if not self.ready or self.at_home:
            return False
        self.write_back_if_edited()
        if self.held:
            return False
        self._point(self._stubs)
        self._pool.give(self.page, self._streams.current().record())
        self.buffer, self.ready = None, False
        self._pool.ledger.record(Activity.DROP, self.name)
        return True

    def full(self, slot: int) -> torch.Tensor:
        """The full tensor of a parameter; the page is ready."""
        if self.trained[slot]:
            return self.outs[slot]
        place = self.layout.slots[slot]
        return FullTensor.of(place.full(self.page[place.offset : place.end]), self, slot)

    def _point(self, memory: Sequence[torch.Tensor]) -> None:
        for out, data in zip(self.outs, memory, strict=True):
            set_data(out, data)  # its place in the autograd graph stays

    @property
    def held(self) -> bool:
        """Does somebody else refer to the page? Counts references in Python, autograd and views."""
        if torch._C._storage_Use_Count(self.page.untyped_storage()._cdata) > self._own_references:
            return True
        return any(sys.getrefcount(out) > _OUT_REFERENCES or _owners(out) > 1 for out in self.outs)

    # ---- edits through full tensors
    def _edit_counters(self) -> list[int]:
        return [*(out._version for out in self.outs), self.page._version]

    def write_back_if_edited(self) -> None:
        """An edit that was not reported (through an alias of a full tensor) reaches the shard here."""
        seen = self._edits_seen
        if self.ready and seen is not None and (now := self._edit_counters()) != seen:
            self._edits_seen = now  # a fence looks for edits too
            slots = [slot for slot in range(len(self.leaves)) if now[slot] != seen[slot] or now[-1] != seen[-1]]
            for slot in slots:
                with self.gate.writing(f"an edit of {self.layout.slots[slot].name}", self, slot):
                    self.write_back(slot)

    def stray_edit(self) -> str | None:
        """The name of a parameter whose shard was written to through its full tensor by a function that does not tell
        (`torch._foreach_mul_`, `out=`), and has not passed a fence since. Where the page is the shard's home there is
        nothing left of the values before."""
        seen = self._edits_seen
        if not self.at_home or not self.ready or seen is None:
            return None
        now = self._edit_counters()
        stray = [slot for slot in range(len(self.leaves)) if now[slot] != seen[slot] and slot not in self.undo]
        if stray:
            return self.layout.slots[stray[0]].name
        frozen = now[-1] != seen[-1] and not self.undo  # their full tensors share the page's counter
        return f"of unit {self.name}" if frozen else None

    def write_back(self, slot: int) -> None:
        """A full tensor was edited: its part on this rank goes into the shard. The page stays valid."""
        place = self.layout.slots[slot]
        # At home both are the same memory: nothing is copied, and the version moves all the same.
        self.pieces[slot].copy_(self.page[place.offset : place.end][self.layout.within(place, self.rank)])
        self._read_at = self.version
        self._edits_seen = self._edit_counters()

    def shard_after(self, edits: int) -> torch.Tensor:
        """A copy of the shard as it was after so many edits. Also right while another is being made."""
        old = self.shard.clone()
        for slot, piece in reversed(list(self.undo.items())[edits - self.fenced :]):
            old[self.layout.piece(self.layout.slots[slot], self.rank)] = piece
        return old


_owners = torch.Tensor._use_count  # type: ignore[attr-defined]

# References to a full tensor that only the unit holds: the tuple, the loop and the argument.
_OUT_REFERENCES = 3
