"""Who tells whom at a meeting, so that all ranks know what each has said.

Ranks pass on what they have heard, in rounds. In each round a rank tells up to 15 others all that it knows: its own
word and those of the ranks just before it. So it knows 16 times as much after each round:

    round 1   rank r tells r + 1, r + 2 ... r + 15     now it knows the words of r - 15 ... r
    round 2   rank r tells r + 16, r + 32 ... r + 240  now it knows the words of r - 255 ... r

Up to 16 ranks tell each other directly, in one round. 16,384 need four, and a rank tells 48 others instead of 16,383.
"""

from typing import NamedTuple

_FACTOR = 16  # by which a round multiplies what a rank knows


class Words(NamedTuple):
    """What a rank tells another in a round: its own word and those of the ranks just before it."""

    rank: int  # the other one
    number: int  # of words


class Round(NamedTuple):
    """Whom a rank tells in one round, and whom it hears, nearest first.
    What is heard goes on where what was known ends."""

    tells: tuple[Words, ...]
    hears: tuple[Words, ...]


def rounds(rank: int, world: int) -> tuple[Round, ...]:
    """This rank's part in a meeting. Ranks are on a circle: rank 0 comes after the last one."""
    found = []
    known = 1
    while known < world:
        distances = range(known, min(known * _FACTOR, world), known)
        counts = [min(known, world - distance) for distance in distances]
        pairs = list(zip(distances, counts, strict=True))
        tells = tuple(Words((rank + distance) % world, count) for distance, count in pairs)
        hears = tuple(Words((rank - distance) % world, count) for distance, count in pairs)
        found.append(Round(tells, hears))
        known *= _FACTOR
    return tuple(found)
