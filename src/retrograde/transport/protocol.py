"""The door to other ranks: what an engine needs of them, and nothing else.

[Note: the door]
An engine reads shards into pages, contributes gradients, meets the other ranks and tells them of failures. How bytes
get there is the affair of what stands behind this door:

| implementation              | ranks are                     | bytes go                                  |
|-----------------------------|-------------------------------|-------------------------------------------|
| `transport/mapped/transport.py` | processes of one host      | in shared memory                          |
| `one_sided.py`              | processes                     | over connections (`connections.py`)       |
| `staged.py`                 | of another one, with a device | through the host's memory                 |
| `transport/collective/transport.py` | processes                     | by collectives of torch.distributed       |
| `threads.py`                | threads of one process        | from tensor to tensor, in the same memory |
| `fake.py`                   | this one, and as many imagined | nowhere: they are counted                 |

To add another: a class for `Transport` and one for `Ranks`, which `shard_over` (engine/shard.py) takes. `shard()` takes
`ProcessRanks`.

Rule 1: `read`, `put` and `reduce_scatter` return at once. Their work object orders what comes after them: what is
        issued on the stream that `wait` is given finds the data there.
Rule 2: nothing but `meet` waits for another rank's main thread.
Rule 3: what may have to be shared, pinned or registered with a network is allocated here: shards, pages and buckets.
Rule 4: every wait has a time limit. When it has passed, or when a rank has failed, every rank that waits raises an
        error that names the rank and the cause.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import NamedTuple, NoReturn, Protocol

import torch

from retrograde.devices import Stream, Streams
from retrograde.transport.messages import Address, Form, Key, Offers, Reason, Stamp, Value


class Memory(Enum):
    """What memory is for. A transport may want it in a place of its own."""

    SHARD = auto()  # lives as long as the model; other ranks read it
    PAGE = auto()  # other ranks' shards are read into it
    BUCKET = auto()  # a gradient that other ranks take their parts of


class Work(Protocol):
    """Something under way."""

    def wait(self, stream: Stream) -> None:
        """What is issued on `stream` from now on finds it done. The host may have to wait for that."""

    def done(self) -> bool:
        """Would `wait` return at once, and is the memory that was given free again?"""


class Mirror(Protocol):
    """A shard that other ranks see where it lies, and a page in which theirs show, so that nothing is copied.

    What shows changes with the shards. What is written to the page is this rank's own, and reaches nobody."""

    shard: torch.Tensor
    page: torch.Tensor

    @property
    def shows(self) -> bool:
        """Does any shard show in the page?"""

    @property
    def moved(self) -> int:
        """How many bytes the last read has copied from other ranks."""

    @property
    def own_bytes(self) -> int:
        """How many bytes of the page are this rank's own memory."""

    def read(self, name: str, stamp: Stamp) -> Work:
        """Start making the page: shards that are at rest in the state `stamp` show, the others are copied."""

    def keep(self) -> None:
        """What shows becomes this rank's own, as it is."""

    def forget(self) -> None:
        """Nobody refers to the page: it has no memory, and shows nothing, until it is read again."""


class Position(NamedTuple):
    """What a rank brings to a meeting: why it came, and what it has for the others.

    `sent`: gradients that it has put since its last meeting. This one adds them up, whatever the others came for.
    `pending`: gradients that it would put if this meeting turns out to flush them.
    """

    reason: Reason
    label: str
    sent: Offers
    pending: Offers
    value: Value = None


class Rest(Enum):
    """May a reader take a rank's shards as they lie in memory?"""

    AT_REST = 0
    STEPPING = 1  # as soon as the step has ended
    ASK = 2  # only if their owner finds that they are what the reader needs


class ShardServer(Protocol):
    """An engine, as other ranks' readers see it. Called by any thread, whatever the engine's own thread is doing."""

    def shard_for(self, unit: int, stamp: Stamp) -> torch.Tensor | str:
        """The unit's shard in the state that a reader needs, else why it is not to be had (yet).

        It is to be read on the `serving` stream of its device (devices/streams.py)."""

    def shard_numel(self, unit: int) -> int:
        """How many elements the unit's shard has on this rank."""

    def state(self) -> tuple[int, Rest]:
        """How many fences this rank has passed, and whether its shards are as the last one left them."""


class GatheredShards(ShardServer, Protocol):
    """An engine whose pages all ranks gather together."""

    def shard_to_gather(self, unit: int) -> torch.Tensor:
        """The unit's shard for those who gather its page, at rest. Raises RuntimeError where they may not have it."""


class Transport(Protocol):
    """One engine's way to the other ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def meetings(self) -> int:
        """How many meetings this rank has come to."""

    timeout: float

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Memory of the stream's device, not initialized: all of a storage that nothing else has."""

    def mirror(self, unit: int, spans: Mapping[int, slice], dtype: torch.dtype, returns: bool) -> Mirror | None:
        """Memory for the shard and the page of `unit`. `spans`: which part of the page each rank owns.
        `returns`: the page is there again after each step. None: there is no such memory here, and pages are copies."""

    # ---- shards
    def read(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        """Start reading the shards that these ranks have of `unit`, in the state `stamp`, each into its tensor."""

    def shards_changed(self) -> None:
        """This rank's shards have changed: a reader that had to wait may be served now."""

    def reclaim(self, at_fence: bool) -> None:
        """Before this rank writes to its shards, which are not at rest any more: they show in no page of another rank
        after this. `at_fence`: all have come to one, and let go by themselves; else service threads are told to."""

    # ---- gradients, one by one: parts go to their owners, which add them up themselves
    def put(self, key: Key, parts: Mapping[int, Sequence[torch.Tensor]]) -> Work:
        """Start sending to each rank its part, which may lie in pieces. They must not change until the work is done."""

    def arrived(self, key: Key, src: int) -> bool: ...

    def take(self, key: Key, src: int, unit: str) -> torch.Tensor:
        """What `src` put under `key`: it said so at a meeting, so it is there or on its way. It is the caller's."""

    def discard_parts(self) -> None:
        """Forget what was put before the last meeting and never taken."""

    # ---- agreement
    def meet(self, position: Position) -> list[Position]:
        """Wait until every rank has come to its next meeting; returns everybody's position, by rank."""

    def meeting_is_over(self) -> None:
        """What the last meeting asked of this rank is done; after one for a step, its shards are at rest."""

    # ---- failure
    def check(self) -> None:
        """Raise if something has gone wrong on any rank."""

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        """Tell all ranks that this engine is of no further use, and raise."""

    def shared_fate(self, what: str) -> AbstractContextManager[None]:
        """What goes wrong inside on one rank is told to the others, which would wait for it in vain."""


class BackendTransport(Transport, Protocol):
    """One over which the backend of torch.distributed can add up gradients, when all ranks have them."""

    def open_collectives(self) -> None:
        """Called once, by all ranks, before the first of the following."""

    def ready(self, key: Key) -> None:
        """This rank can take part in the reduction of `key`."""

    def agreed(self) -> Iterable[Key]:
        """Keys for which all ranks are ready and that this call is the first to return. All ranks get them in the same
        order, and those that any rank gets before a meeting all ranks get before they return from it."""

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor) -> Work:
        """Start adding up `whole` over all ranks; this rank's part of the sum goes to `own`. All ranks call it for the
        same things in the same order. Both tensors are kept until the work is done."""


class GradientWant(NamedTuple):
    """A reduction that all ranks come to, in one order.

    `name`: the unit's. `uses`: what each parameter's gradient is for, which is the same on all ranks that want the
    same. `at_meeting`: a meeting has just said that it comes next."""

    key: Key
    name: str
    uses: bytes
    at_meeting: bool


class OrderedTransport(Transport, Protocol):
    """One whose pages and gradients go by collectives, in an order that all ranks share. What does not fit into it goes
    one by one: then the following return None, and the caller reads or puts."""

    def open(self, rows: Sequence[Sequence[int]]) -> None:
        """Called once, by all ranks, before the first of the following. `rows`: the ranks of each replica, by shard."""

    def gather(self, unit: int, name: str, shard: torch.Tensor, memory: torch.Tensor) -> Work | None:
        """Start making a page of all ranks' shards, which are at rest, in `memory`."""

    def exchange(self, want: GradientWant, parts: torch.Tensor, received: torch.Tensor) -> Work | None:
        """Start sending to each rank its part of a gradient, and receiving this rank's, in the order of ranks."""

    def present(self, received: torch.Tensor) -> dict[int, torch.Tensor]:
        """Of an exchange that is done, in the host's memory: the parts of those that brought one."""

    def keep(self, key: Key, parts: dict[int, torch.Tensor]) -> None:
        """They count as put by these ranks under `key`."""

    def add_up(self, want: GradientWant, whole: torch.Tensor, total: torch.Tensor) -> Work | None:
        """Start adding up `whole` over all ranks, in the backend's order; this rank's part of it goes to `total`."""


class Parts(NamedTuple):
    """The content of a pipeline's message: tensors, and how they are put together again."""

    form: Form
    tensors: list[torch.Tensor | None]


class Incoming(Protocol):
    """A message that is to come."""

    def wait(self, stream: Stream) -> Parts | None:
        """Its content, which what is issued on `stream` from now on finds there; None if its sender has failed."""


class Way(NamedTuple):
    """From which rank of a pipeline to which other tensors go."""

    source: int
    target: int


class Channel(Protocol):
    """A pipeline's way between its stages."""

    def send(self, peer: int, address: Address, content: Parts) -> None: ...

    def send_void(self, peer: int, address: Address) -> None:
        """There will be no content: this rank has failed."""

    def receive(self, peer: int, address: Address) -> Incoming:
        """What is to come to an address."""


class Ranks(Protocol):
    """The ranks that share a model: what `shard()` and `Pipeline()` reach each other through."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def transport(self, shards: ShardServer, streams: Streams, timeout: float) -> BackendTransport:
        """For one engine, whose tensors are on the streams' device. All ranks make theirs in the same order."""

    def say_goodbye(self) -> None:
        """This rank has finished. It goes on serving those that have not."""


class PipelineRanks(Ranks, Protocol):
    """Ranks that can also hold stages of a pipeline."""

    def channel(self, streams: Streams, patience: float, ways: Sequence["Way"]) -> Channel:
        """For one pipeline, whose tensors are on the streams' device. All ranks make theirs in the same order, with
        the same ways."""
