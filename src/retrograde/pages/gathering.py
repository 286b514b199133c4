"""Pages that all ranks read together, by a collective: every rank takes part, also one that still has the page."""

import torch

from retrograde.pages.pool import BufferPool
from retrograde.pages.unit import Unit
from retrograde.transport import OrderedTransport, Work


class PageGathering:
    """Pages that all ranks make together, by one call for each."""

    def __init__(self, transport: OrderedTransport, pool: BufferPool) -> None:
        self._transport = transport
        self._pool = pool

    def gather(self, unit: Unit, page: torch.Tensor) -> Work | None:
        """Start reading all shards of a unit, which are at rest, into the memory of a page. None: read them alone.

        The call takes this rank's shard from where it lies, unless that is on the host. Where the page stays, the shard
        lies inside it, and the call leaves that part alone: others may read it there, and must be able to, since this
        call may wait for them."""
        own = unit.source
        if unit.source_on_host:
            unit.fetch_own(page)
            own = page[unit.layout.span(unit.rank)]
        return self._transport.gather(unit.index, unit.name, own, page)

    def take_part(self, unit: Unit) -> None:
        """Take part in a gather whose page this rank has already: what comes is thrown away."""
        current, fetching = self._pool.streams.current(), self._pool.streams.fetching
        scratch, free = self._pool.take(unit.layout.padded_numel, unit.layout.dtype)
        fetching.wait(free)
        fetching.wait(current.record())  # a step may have written the shard there
        work = self.gather(unit, scratch)
        if work is not None:
            work.wait(current)  # which may write the shard next, or have the memory
        self._pool.give(scratch, current.record())
