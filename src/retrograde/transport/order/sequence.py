"""The agreed sequence and the calls it implies.

[Note: the agreed sequence]
Every rank has the same sequence W of entries, up to its length: one rank may be ahead of another. What a rank issues on
the communicator is a function of W alone (Rule 1), prefetches included, so that ranks at the same place in W have
issued the same calls, and a rank that is behind a prefix of them. Nobody has to agree on a prefetch.

Places in W are counted from the last boundary: a *period* is what lies between two of them.
"""

import itertools
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import msgspec

from retrograde.transport.order.policy import OrderPolicy
from retrograde.transport.order.predictor import Predictor
from retrograde.transport.order.wants import STEP, Gather, Reduce, SequenceEntry, Want


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective on the communicator: on all ranks the same want has the same number."""

    number: int
    want: Want
    length: int  # a rank whose part of W in this period has this length has issued it


class Consumed(NamedTuple):
    """What follows from W's growth by an entry."""

    call: CollectiveCall | None  # that serves the entry; None for a boundary
    issued: tuple[CollectiveCall, ...]  # now and in this order; `call` is the first of them unless it was prefetched
    dropped: tuple[CollectiveCall, ...]  # prefetched in vain


class Vocabulary:
    """Gives numbers to entries. A want gets one when it is first guessed or granted, so it is the same on all ranks."""

    def __init__(self) -> None:
        self._numbers: dict[SequenceEntry, int] = {}
        self._entries: dict[int, SequenceEntry] = {}
        self._next = 0

    def number(self, entry: SequenceEntry) -> int:
        found = self._numbers.get(entry)
        if found is not None:
            return found
        number = self._next
        self._next += 1
        self._numbers[entry] = number
        self._entries[number] = entry
        return number

    def entry(self, number: int) -> SequenceEntry:
        return self._entries[number]

    def keep(self, numbers: Iterable[int]) -> None:
        """Forget all numbers but these. Forgotten ones are not given out again."""
        self._entries = {number: self._entries[number] for number in sorted(set(numbers))}
        self._numbers = {entry: number for number, entry in self._entries.items()}

    def __len__(self) -> int:
        return len(self._entries)


class AgreedSequence:
    """W, what it lets one expect, and the calls that it implies."""

    def __init__(self, policy: OrderPolicy, guess: Sequence[Want] = ()) -> None:
        """`guess`: the wants of a period as one expects them before the first; the same on all ranks."""
        self._policy = policy
        self._vocabulary = Vocabulary()
        past: list[SequenceEntry] = [STEP, *guess, STEP] if guess else [STEP]
        self._predictor = Predictor(policy.generation, [self._vocabulary.number(entry) for entry in past])
        self._prefetched: deque[CollectiveCall] = deque()
        self._calls = 0
        self.length = 0  # of this period

    # ---- what is expected
    def expected(self) -> SequenceEntry | None:
        number = self._predictor.peek()
        return None if number is None else self._vocabulary.entry(number)

    def ahead(self, limit: int) -> list[Want]:
        """The wants that are expected next, up to `limit` of them."""
        return list(self._foreseen(limit))

    def _foreseen(self, limit: int) -> Iterator[Want]:
        """Yield the wants that are expected, not beyond a boundary, nor beyond a place where the past may be cut."""
        for i in range(min(limit, self._until_mark())):
            number = self._predictor.peek(i)
            entry = None if number is None else self._vocabulary.entry(number)
            if not isinstance(entry, Gather | Reduce):
                return
            yield entry

    def _until_mark(self) -> int:
        return self._policy.mark - self.length % self._policy.mark

    def horizon(self) -> int:
        """The length to which a rank that leaves goes in advance: the expected boundary, if it is near."""
        return self.length + len(self.ahead(self._policy.horizon))

    # ---- growing
    def consume(self, entry: SequenceEntry) -> Consumed:
        """Let W grow by an entry, and issue what follows from that (Rule 1). A gather that was not foreseen, or a
        boundary, drops what was prefetched."""
        hit = bool(self._prefetched) and self._prefetched[0].want == entry
        dropped: tuple[CollectiveCall, ...] = ()
        if not hit and self._ends_prefetches(entry):
            dropped = tuple(self._prefetched)
            self._prefetched.clear()
        self._append(entry)
        issued: list[CollectiveCall] = []
        call: CollectiveCall | None = None
        if hit:
            call = self._prefetched.popleft()
        elif isinstance(entry, Gather | Reduce):
            call = self._issue(entry, issued)
        for gather in self._to_prefetch():
            self._prefetched.append(self._issue(gather, issued))
        return Consumed(call, tuple(issued), dropped)

    def _ends_prefetches(self, entry: SequenceEntry) -> bool:
        """Were prefetches in vain if this entry comes instead? A page that comes unforeseen shows that the forecast was
        wrong; at a boundary shards may change."""
        return not isinstance(entry, Reduce)

    def forget_units(self, units: Iterable[int]) -> None:
        """Take the wants of these units out of W's past: they are no longer agreed on.
        Called at a boundary, before it is consumed."""
        gone = frozenset(units)

        def is_unwanted(number: int) -> bool:
            entry = self._vocabulary.entry(number)
            return isinstance(entry, Gather | Reduce) and entry.unit in gone

        self._predictor = self._predictor.without(is_unwanted)

    def _append(self, entry: SequenceEntry) -> None:
        boundary = not isinstance(entry, Gather | Reduce)
        length = 0 if boundary else self.length + 1
        forgot = self._predictor.append(self._vocabulary.number(entry), may_forget=length % self._policy.mark == 0)
        if forgot:
            self._vocabulary.keep(self._predictor.entries())
        self.length = length

    def _issue(self, want: Want, issued: list[CollectiveCall]) -> CollectiveCall:
        call = CollectiveCall(self._calls, want, self.length)
        self._calls += 1
        issued.append(call)
        return call

    def _to_prefetch(self) -> list[Gather]:
        """The next gathers that are foreseen, less those that have been issued."""
        first, depth = len(self._prefetched), self._policy.depth
        if first >= depth:
            return []
        gathers = (want for want in self._foreseen(self._policy.window) if isinstance(want, Gather))
        return list(itertools.islice(gathers, first, depth))

    def fingerprint(self) -> int:
        """A checksum of what must be the same on all ranks before the first call:
        the policy's numbers, and the guess."""
        numbers = [getattr(self._policy, each.name) for each in fields(self._policy) if each.name != "patience"]
        guess = [self._vocabulary.entry(number) for number in self._predictor.entries()]
        return zlib.crc32(msgspec.msgpack.encode([numbers, guess]))

    # ---- for tests: is what is kept bounded, and is a state one that was seen before?
    def sizes(self) -> dict[str, int]:
        return {"past": len(self._predictor.entries()), "words": len(self._vocabulary), "pages": len(self._prefetched)}

    def state(self) -> tuple[object, ...]:
        words = tuple(self._vocabulary.entry(number) for number in self._predictor.entries())
        return words, self._predictor.following, tuple(self._prefetched), self.length
