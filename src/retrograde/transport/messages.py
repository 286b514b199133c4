"""What ranks say to each other: every message that travels is one of the types below.

[Note: messages]
A message comes from another process, which may be broken or may not be a rank at all. So it is never unpickled: it is
msgpack, and `decode` makes one of a closed set of types from it or raises `MessageError`. No type names code.
The types do not know how messages are carried (envelope.py, wires.py). The bytes of tensors are not in
a message: they travel beside it, and the message says enough for the receiver to know where they belong.

Rule 1: a field has a type that `decode` checks; counts and indices are not negative.
Rule 2: the receiver says how many bytes of tensors it expects with a message, and takes memory only for these.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum, StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta, Struct

from retrograde.transport.records import Count, Record


class MessageError(ValueError):
    """Bytes that are not a message, or a message that its receiver cannot take."""


class SharedPlace(NamedTuple):
    """Where something lies in a rank's shared memory (mapped/): in which stretch of it, and where in its data."""

    offset: Count  # of the stretch
    nbytes: Count  # of its data
    start: Count


# ---- reading shards
class Stamp(Record, frozen=True):
    """Names the state of a unit's shards that a reader needs (coordination/fences.py)."""

    clock: Count
    edits: Count
    stray: int
    stepped: Count = 0  # at which clock the last step began that has ended


# ---- gradients
class Use(IntEnum):
    """What a backward does with a parameter's gradient on one rank."""

    NONE = 0
    CAPTURED = 1  # torch.autograd.grad returns it
    ACCUMULATED = 2  # it goes to .grad


class Key(Record, frozen=True, order=True):
    """Names a gradient that is put. Ranks that do the same things since a meeting come to the same keys.

    `meeting`: the last one before it. `attempt`: counts what was given up since then. `backward`: counts the backwards
    that have ended since then. `turn`: counts the unit's gradients since then (gradients/keys.py).
    """

    unit: Count
    meeting: Count
    attempt: Count
    turn: Count
    backward: Count = 0

    def same_but_for_attempt(self, other: "Key") -> bool:
        mine = (self.unit, self.meeting, self.turn, self.backward)
        return mine == (other.unit, other.meeting, other.turn, other.backward)


Uses = tuple[Use, ...]  # for each parameter of a unit
Offers = dict[Key, Uses]  # what a rank says at a meeting about the gradients it has put, or would put


# ---- meetings
class Reason(StrEnum):
    """Why a rank came to a meeting, most urgent first (coordination/coordinator.py)."""

    BACKWARD = "the end of a backward"
    FENCE = "an edit of the weights"
    FLUSH = "a reduction of pending gradients"
    STEP = "an optimizer step"
    VALUE = "a value over all ranks"


class TensorForm(Struct, frozen=True, tag="tensor", forbid_unknown_fields=True):
    """A tensor whose bytes travel beside the message, in the order in which the forms stand in it."""

    dtype: torch.dtype
    shape: tuple[Count, ...]

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for place in self.shape:
            size *= place
        return size

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="cpu")


class Octets(Struct, frozen=True, tag="octets", forbid_unknown_fields=True):
    """Plain bytes."""

    data: bytes


class Items(Struct, frozen=True, tag="items", forbid_unknown_fields=True):
    """A list of values."""

    items: "list[PackedValue]"


# What a rank may bring to a meeting, and the same as it travels.
Value = None | bool | int | float | str | bytes | torch.Tensor | Sequence["Value"]
PackedValue = None | bool | int | float | str | Octets | TensorForm | Items


# ---- trees of pipelines: see pipeline/trees.py
class Group(Struct, frozen=True, tag="group", forbid_unknown_fields=True):
    """A list, tuple, dict or the like inside of a constant; `kind` is one of the few that pipeline/trees.py knows."""

    kind: str
    items: "list[Constant]"


Constant = None | bool | int | float | str | Octets | Group


class TreeLeaf(Record, frozen=True, tag="leaf"):
    """A tensor, or something constant."""


class TreeNode(Record, frozen=True, tag="node"):
    """A container: the name of its type, which the receiver must know, what the type needs besides, its children."""

    name: str
    context: Constant
    children: "list[TreeLeaf | TreeNode]"


class TensorLayout(Record, frozen=True):
    """A tensor as it is made again on the other side. Memory order is kept, since kernels choose by it.

    `on_host`: its bytes travel beside the message; else by another way, from device to device."""

    size: tuple[Count, ...]
    stride: tuple[Count, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_host: bool = True


class TreeForm(Record, frozen=True):
    """A tree of which each leaf is a tensor or a constant; `constants` has None where a tensor stands.

    `share`: of the step's samples, what the microbatch is."""

    root: TreeLeaf | TreeNode
    constants: list[Constant]
    share: float = 1.0


class Form(Record, frozen=True):
    """How the tensors of a pipeline's message are put together: a tree, or (None) a list of gradients."""

    tensors: tuple[TensorLayout | None, ...]
    tree: TreeForm | None


class Address(Record, frozen=True):
    """One message of a pipeline's step: what goes `forward` out of, or back into, the output of `stage`."""

    forward: bool
    stage: Count
    microbatch: Count

    def __str__(self) -> str:
        return f"{'output' if self.forward else 'output gradient'} of stage {self.stage}, microbatch {self.microbatch}"


# ---- messages to a receiver: the engine or pipeline of that number (connections.py)
class Read(Record, frozen=True, tag="read"):
    """Send me your shard of this unit, when it is in this state."""

    receiver: Count
    unit: Count
    stamp: Stamp


class ShardData(Record, frozen=True, tag="page"):
    """The sender's shard of a unit, which the receiver asked for."""

    receiver: Count
    unit: Count
    place: SharedPlace | None = None  # where it lies in memory that the receiver may have mapped
    state: SharedPlace | None = None  # where the sender says whether its shards are at rest


class Handed(Record, frozen=True, tag="handed"):
    """The receiver's part of a gradient, in the sender's shared memory (mapped/)."""

    receiver: Count
    key: Key
    dtype: torch.dtype
    place: SharedPlace


class Put(Record, frozen=True, tag="put"):
    """The receiver's part of a gradient."""

    receiver: Count
    key: Key
    dtype: torch.dtype


class PackedPosition(Record, frozen=True):
    """What a rank brings to a meeting (`Position` in protocol.py), as it travels."""

    reason: Reason
    label: str
    sent: Offers
    pending: Offers
    value: PackedValue


class Meet(Record, frozen=True, tag="meet"):
    """The sender's position at its meeting of this number, and those of ranks before it that it has heard (rounds.py).

    They may come in several messages."""

    receiver: Count
    number: Count
    positions: list[PackedPosition]


class Ordered(Record, frozen=True, tag="ordered"):
    """A message about the order of collectives (transport/order/messages.py), encoded."""

    receiver: Count
    data: Annotated[bytes, Meta(max_length=2**20)]
    needs_answer: bool = False  # somebody waits, in vain if the receiver is gone


class Ask(Record, frozen=True, tag="ask"):
    """Where are you? Asked when a wait has taken too long."""

    receiver: Count


class Tell(Record, frozen=True, tag="tell"):
    """The answer to `Ask`: where the sender is."""

    receiver: Count
    where: str


class Fail(Record, frozen=True, tag="fail"):
    """This engine is of no further use, on any rank; `text` says why."""

    receiver: Count
    text: str


class Content(Record, frozen=True, tag="content"):
    """The tensors at an address of a pipeline; `form` is None if it is what it was the last time.

    `turn`: how many messages went to this address before it."""

    receiver: Count
    address: Address
    turn: Count
    form: Form | None


class Lent(Record, frozen=True, tag="lent"):
    """As `Content`, with the bytes of the tensors in the sender's shared memory (mapped/)."""

    receiver: Count
    address: Address
    turn: Count
    form: Form | None
    place: SharedPlace


class Void(Record, frozen=True, tag="void"):
    """There will be no content at this address: its sender has failed."""

    receiver: Count
    address: Address
    turn: Count


ToReceiver = Read | ShardData | Put | Handed | Meet | Ordered | Ask | Tell | Fail | Content | Lent | Void


# ---- messages to a rank, whatever it has made
class FirstCause(Record, frozen=True, tag="cause"):
    """Something has gone wrong with a rank, and the sender knows of nothing that went wrong before it."""

    rank: Count
    text: str


class Share(Record, frozen=True, tag="share"):
    """The sender's memory, which a process of the same host can map (mapped/)."""

    process: Count
    descriptor: Count
    device: Count  # this and the next say which file it is
    inode: Count


class Mapped(Record, frozen=True, tag="mapped"):
    """The sender has mapped the receiver's memory."""


class Goodbye(Record, frozen=True, tag="goodbye"):
    """The sender has finished: it needs nothing more, and answers reads until all have said this."""


ToRank = FirstCause | Goodbye | Share | Mapped
Message = ToReceiver | ToRank


# ---- what ranks tell each other in the group's store
class UnixAddress(Record, frozen=True, tag="unix"):
    """Where a rank of the same host is reached."""

    name: Annotated[str, Meta(pattern="^@[0-9a-z-]+$")]  # without a file

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.name}"


class TcpAddress(Record, frozen=True, tag="tcp"):
    """Where a rank of another host is reached."""

    host: Annotated[str, Meta(pattern="^[0-9A-Fa-f.:]+$")]
    port: Annotated[int, Meta(ge=0, le=65535)]

    @property
    def endpoint(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


class Contact(Record, frozen=True):
    """How a rank can be reached, by its two wires (wires.py)."""

    key: Annotated[bytes, Meta(min_length=40, max_length=40)]  # public
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]  # of the bulk wire
    control: UnixAddress | TcpAddress
    bulk: UnixAddress | TcpAddress


# ---- to bytes and back
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _to_plain(item: Any) -> str:
    if isinstance(item, torch.dtype):
        return str(item)
    raise NotImplementedError(f"a {type(item).__name__} has no place in a message")


def _from_plain(wanted: type, item: Any) -> torch.dtype:
    if wanted is torch.dtype and isinstance(item, str) and item in DTYPES:
        return DTYPES[item]
    raise ValueError(f"{item!r} is not a {wanted.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message, dec_hook=_from_plain)
_contacts = msgspec.msgpack.Decoder(Contact)
_texts = msgspec.msgpack.Decoder(list[str])

encode = _encoder.encode


def decode(data: bytes | memoryview) -> Message:
    return _decoded(_messages, data)  # type: ignore[no-any-return]


def decode_contact(data: bytes) -> Contact:
    return _decoded(_contacts, data)  # type: ignore[no-any-return]


def decode_texts(data: bytes) -> list[str]:
    return _decoded(_texts, data)  # type: ignore[no-any-return]


def _decoded(decoder: msgspec.msgpack.Decoder[Any], data: bytes | memoryview) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MessageError(str(error)) from error


# ---- values of meetings
def pack(value: Value) -> tuple[PackedValue, list[torch.Tensor]]:
    """A value as it travels, and the tensors whose bytes go beside it."""
    tensors: list[torch.Tensor] = []
    return _packed(value, tensors), tensors


def _packed(value: Any, tensors: list[torch.Tensor]) -> PackedValue:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return Octets(value)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TensorForm(value.dtype, tuple(value.shape))
    if isinstance(value, list | tuple):
        return Items([_packed(item, tensors) for item in value])
    raise TypeError(f"a {type(value).__name__} cannot be brought to a meeting")


def tensor_forms(packed: PackedValue) -> list[TensorForm]:
    if isinstance(packed, Items):
        return [form for item in packed.items for form in tensor_forms(item)]
    return [packed] if isinstance(packed, TensorForm) else []


def unpack(packed: PackedValue, tensors: Sequence[torch.Tensor]) -> Value:
    """The value that was packed; `tensors` are those of its forms, in order."""
    return _unpacked(packed, iter(tensors))


def _unpacked(packed: PackedValue, tensors: Iterator[torch.Tensor]) -> Value:
    if isinstance(packed, Items):
        return [_unpacked(item, tensors) for item in packed.items]
    if isinstance(packed, TensorForm):
        return next(tensors)
    if isinstance(packed, Octets):
        return packed.data
    return packed
