"""What messages are made of: those of the transport (messages.py) and those of the order of collectives (order/)."""

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message, or a part of one. It travels as the list of its fields."""
