"""The door to other ranks: what an engine needs of them, and nothing else.

[Note: the door]
An engine reads shards into pages, contributes gradients, meets the other ranks and tells them of failures. How bytes
get there is the affair of what stands behind this door:

| implementation              | ranks are                     | bytes go                                  |
|-----------------------------|-------------------------------|-------------------------------------------|
| `transport/mapped/transport.py` | processes of one host      | in shared memory                          |
| `one_sided.py`              | processes                     | over connections (`connections.py`)       |
| `staged.py`                 | those of another transport    | from a device through the host's memory   |
| `transport/collective/transport.py` | processes                     | by collectives of torch.distributed       |
| `threads.py`                | threads of one process        | from tensor to tensor, in the same memory |
| `fake.py`                   | this one, and as many imagined | nowhere: they are counted                 |

To add another: a class for `Transport` and one for `Ranks`, which `shard_over` (engine/shard.py) takes; `shard()` makes
`ProcessRanks`. Ranks that also make a `Channel` are `PipelineRanks`, which `Pipeline(mesh=...)` takes.

Rule 1: `read` and `put` return at once. Their work object orders what comes after them: what is issued on the stream
        that `wait` is given finds the data there.
Rule 2: nothing but `meet` waits for another rank's main thread.
Rule 3: what may have to be shared, pinned or registered with a network is allocated here: shards, pages and buckets.
Rule 4: every wait has a time limit. When it has passed, or when a rank has failed, every rank that waits raises an
        error that names the rank and the cause.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import NamedTuple, NoReturn, Protocol, runtime_checkable

import torch

from retrograde.devices import Stream, Streams
from retrograde.transport.messages import Address, Form, Key, Offers, Reason, Stamp, Value


class Memory(Enum):
    """What memory is for. A transport may want it in a place of its own."""

    SHARD = auto()  # lives as long as the model; other ranks read it
    PAGE = auto()  # other ranks' shards are read into it
    BUCKET = auto()  # a gradient that other ranks take their parts of


class Work(Protocol):
    """Something that a transport has started, and that may be under way."""

    def wait(self, stream: Stream) -> None:
        """Make `stream` come after it: what is issued there from now on finds it done.
        The host may have to wait for that."""

    def done(self) -> bool:
        """Would `wait` return at once, and is the memory that was given free again?"""


class Position(NamedTuple):
    """What a rank brings to a meeting: why it came, and what it has for the others.

    `sent`: gradients that it has put since its last meeting. This one adds them up, whatever the others came for.
    `pending`: gradients that it would put if this meeting turns out to flush them.
    `value`: what it says besides; at the end of a backward, which one since the last meeting.
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
        """The unit's shard for those who gather its page, at rest, to be read on the `serving` stream. Raises
        RuntimeError where they may not have it."""


class Transport(Protocol):
    """One engine's way to the other ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def meetings(self) -> int:
        """How many meetings this rank has come to, as far as keys of gradients count them."""

    timeout: float

    def allocate(self, memory: Memory, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Memory of the stream's device, not initialized: all of a storage that nothing else has."""

    # ---- shards
    def read(self, unit: int, name: str, stamp: Stamp, into: Mapping[int, torch.Tensor]) -> Work:
        """Start reading the shards that these ranks have of `unit`, in the state `stamp`, each into its tensor."""

    def shards_changed(self) -> None:
        """Note that this rank's shards have changed: a reader that had to wait may be served now."""

    # ---- gradients, one by one: parts go to their owners, which add them up themselves
    def put(self, key: Key, parts: Mapping[int, Sequence[torch.Tensor]]) -> Work:
        """Start sending to each rank its part, which may lie in pieces. They must not change until the work is done."""

    def arrived(self, key: Key, src: int) -> bool: ...

    def take(self, key: Key, src: int, unit: str) -> torch.Tensor:
        """The part that `src` put under `key`: it said so at a meeting, so the part is there or on its way.
        The caller owns it."""

    def discard_parts(self) -> None:
        """Forget what was put before the last meeting and never taken."""

    # ---- agreement
    def meet(self, position: Position, anew: Callable[[], Position] | None = None) -> list[Position]:
        """Wait until every rank has come to its next meeting; returns everybody's position, by rank.

        `anew`: asked for the position again if gradients have come here while the others were waited for."""

    def meeting_is_over(self) -> None:
        """Note that what the last meeting asked of this rank is done; after one for a step, its shards are at rest."""

    # ---- failure
    def check(self) -> None:
        """Raise if something has gone wrong on any rank."""

    def fail(self, text: str, cause: BaseException | None = None) -> NoReturn:
        """Tell all ranks that this engine is of no further use, and raise."""

    def shared_fate(self, what: str) -> AbstractContextManager[None]:
        """Tell the other ranks if something goes wrong inside on this one: they would wait for it in vain."""


class CourtesySum(NamedTuple):
    """The sum for this rank's shard that a call has brought in which this rank took part without a gradient.

    `uses`: what each parameter's gradient is for, as the others' want named it."""

    key: Key
    uses: bytes
    total: torch.Tensor


class GradientWant(NamedTuple):
    """A reduction that all ranks come to, in one order.

    `name`: the unit's. `uses`: what each parameter's gradient is for, which is the same on all ranks that want the
    same. `at_meeting`: a meeting has just said that it comes next."""

    key: Key
    name: str
    uses: bytes
    at_meeting: bool


class ReplicaExchange(NamedTuple):
    """What a rank brings to an exchange of a gradient's parts among a replica's ranks, and then of the sums of replicas
    among the ranks that hold the same shard.

    `parts`: what this rank has for each rank of its replica. `received`: what each of them has of this rank's shard.
    `add_up` issues, on the reducing stream, their sum, which goes to `own` as it travels. `sums`: that of each replica,
    in order; `own` is a part of it."""

    parts: torch.Tensor
    received: torch.Tensor
    add_up: Callable[[], None]
    own: torch.Tensor
    sums: torch.Tensor


class OrderedTransport(Transport, Protocol):
    """A transport whose pages and gradients go by collectives, in an order that all ranks share. What does not fit into
    it goes one by one: then the following return None, and the caller reads or puts."""

    def gather(self, unit: int, name: str, shard: torch.Tensor, memory: torch.Tensor) -> Work | None:
        """Start making a page of all ranks' shards, which are at rest, in `memory`."""

    @property
    def detours(self) -> int:
        """How often this rank has left the order."""

    @property
    def shards(self) -> int:
        """How many ranks hold a model together, and take part in a call."""

    def gather_tensors(self, mine: torch.Tensor, gathered: torch.Tensor) -> Work:
        """At a meeting, start gathering the tensors of the ranks that hold a model together, all of one form, by shard,
        on the current stream."""

    def exchange(self, want: GradientWant, parts: torch.Tensor, received: torch.Tensor) -> Work | None:
        """Start sending to each rank its part of a gradient, and receiving this rank's, in the order of ranks."""

    def exchange_sums(self, want: GradientWant, offered: ReplicaExchange) -> Work | None:
        """Start an exchange among the ranks of a replica, and then between replicas.
        Its `add_up` may be called by any thread."""

    def complete(self, exchanges: Sequence[tuple[Work, torch.Tensor]]) -> list[bool]:
        """Say of each exchange whether every rank brought a part. Each comes with the parts that were received, or the
        replicas' sums. The reducing stream waits for them, and the host does, once."""

    def present(self, received: torch.Tensor) -> dict[int, torch.Tensor]:
        """The parts that an exchange, which is done, has brought of this replica's ranks, in the host's memory, by
        rank. A rank that was absent has none."""

    def keep(self, key: Key, parts: dict[int, torch.Tensor]) -> None:
        """Let these parts count as put by their ranks under `key`."""

    def add_up(self, want: GradientWant, whole: torch.Tensor, total: torch.Tensor) -> Work | None:
        """Start adding up `whole` over all ranks, in the backend's order; this rank's part of it goes to `total`. With
        replicas the backend adds up each one's ranks, and then replicas.
        A rank that was absent has brought zeros; whatever it puts under this key comes on top."""

    def take_sums(self) -> list[CourtesySum]:
        """Take the sums that such calls have brought for this rank, which was absent, in the order of the calls."""


class Parts(NamedTuple):
    """The content of a pipeline's message: tensors, and how they are put together again."""

    form: Form
    tensors: list[torch.Tensor | None]


class Incoming(Protocol):
    """A message that is to come."""

    def wait(self, stream: Stream) -> Parts | None:
        """The message's content, which what is issued on `stream` from now on finds there;
        None if its sender has failed."""


class Way(NamedTuple):
    """From which rank of a pipeline tensors go to which other one."""

    source: int
    target: int


class Channel(Protocol):
    """A pipeline's way between its stages."""

    def send(self, peer: int, address: Address, content: Parts) -> None: ...

    def send_void(self, peer: int, address: Address) -> None:
        """Say that there will be no content at an address: this rank has failed."""

    def receive(self, peer: int, address: Address) -> Incoming:
        """Expect a message at an address."""


class Ranks(Protocol):
    """The ranks that share a model: what `shard()` and `Pipeline()` reach each other through."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def transport(self, shards: ShardServer, streams: Streams, timeout: float) -> Transport:
        """Make the transport of one engine, whose tensors are on the streams' device.
        All ranks make theirs in the same order."""

    def say_goodbye(self) -> None:
        """Say that this rank has finished. It goes on serving those that have not."""


@runtime_checkable
class PipelineRanks(Ranks, Protocol):
    """Ranks that can also hold stages of a pipeline."""

    def channel(self, streams: Streams, patience: float, ways: Sequence["Way"]) -> Channel:
        """Make the channel of one pipeline, whose tensors are on the streams' device. All ranks make theirs in the same
        order, with the same ways."""
