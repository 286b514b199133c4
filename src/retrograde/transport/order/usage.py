"""What a rank's program has wanted in a period, for comparing it with the other ranks."""

import hashlib
import zlib
from collections import Counter

import msgspec

from retrograde.transport.order.messages import Tally, Usage
from retrograde.transport.order.wants import Gather, Want

USES = 1 << 32


class Usages:
    """Counts what a rank's program wants of each unit in one period."""

    def __init__(self) -> None:
        self._gathers: Counter[int] = Counter()
        self._reductions: Counter[int] = Counter()
        self._uses: Counter[int] = Counter()
        self._denied: set[int] = set()

    def note(self, want: Want) -> None:
        if isinstance(want, Gather):
            self._gathers[want.unit] += 1
            return
        self._reductions[want.unit] += 1
        self._uses[want.unit] = (self._uses[want.unit] + zlib.crc32(want.uses)) % USES

    def deny(self, want: Want) -> None:
        """Note that a want was a surprise, and not granted."""
        self._denied.add(want.unit)

    @property
    def quiet(self) -> bool:
        """Has nothing been contributed to a reduction?"""
        return not self._reductions

    @property
    def denied(self) -> bool:
        return bool(self._denied)

    def ordinal(self, want: Want) -> int:
        """The how-manieth of its unit's reductions the last one is; 0 for a gather."""
        return 0 if isinstance(want, Gather) else self._reductions[want.unit]

    def tallies(self) -> tuple[Tally, ...]:
        units = sorted(self._gathers.keys() | self._reductions.keys())
        return tuple(self._tally(unit) for unit in units)

    def digest(self) -> int:
        """A number that is equal on ranks that have used the same units as often, for the same uses."""
        counts = [
            (unit, self._gathers[unit], self._reductions[unit], self._uses[unit])
            for unit in sorted(self._gathers.keys() | self._reductions.keys())
        ]
        digest = hashlib.blake2b(msgspec.msgpack.encode(counts), digest_size=7).digest()
        return int.from_bytes(digest, "big")

    def _tally(self, unit: int) -> Tally:
        usage = Usage(self._gathers[unit], self._reductions[unit], self._uses[unit])
        return Tally(unit, usage, usage, unit in self._denied)
