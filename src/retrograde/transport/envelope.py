"""A message as it travels: two lengths, the message (messages.py), and the bytes of the tensors that go with it.

The bytes of large tensors travel apart from it (wires.py); their length says so. Lengths are checked before memory is
taken for what they announce.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from retrograde.transport.messages import Message, MessageError, decode, encode

LENGTHS = struct.Struct("<QQ")  # bytes of the message, bytes of the tensors
LIMIT = 2**26  # bytes of a message: names of a million parameters, and far less than memory
INLINE = 2**14  # bytes of tensors that travel with their message


def bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg()  # torch may have left a conjugation to be done when it is read
    return plain.reshape(-1).view(torch.uint8).numpy().data


def pieces(message: Message, data: Sequence[torch.Tensor] = ()) -> list[memoryview]:
    """The lengths and the message, and after that the memory of its tensors."""
    head = encode(message)
    if len(head) > LIMIT:
        raise MessageError(f"a message of {len(head)} bytes; at most {LIMIT} can be sent")
    parts = [bytes_of(tensor) for tensor in data if tensor.numel()]
    lengths = LENGTHS.pack(len(head), sum(map(len, parts)))
    return [memoryview(lengths + head), *parts]


class Opened(NamedTuple):
    """A message that has come."""

    message: Message
    nbytes: int  # of its tensors
    data: memoryview  # these bytes, unless they come apart
    comes_apart: bool


def opened(envelope: memoryview) -> Opened:
    if len(envelope) < LENGTHS.size:
        raise MessageError(f"{len(envelope)} bytes came, which is less than two lengths")
    size, nbytes = LENGTHS.unpack_from(envelope)
    end = LENGTHS.size + size
    if not 0 < size <= LIMIT or end > len(envelope):
        raise MessageError(
            f"a message of {size} bytes was announced in {len(envelope)}; messages have 1 to {LIMIT}, and come whole"
        )
    message, data = decode(envelope[LENGTHS.size : end]), envelope[end:]
    comes_apart = nbytes > INLINE and not len(data)
    if not comes_apart and len(data) != nbytes:
        raise MessageError(f"{nbytes} bytes of tensors were announced with a {type(message).__name__}, not {len(data)}")
    return Opened(message, nbytes, data, comes_apart)
