"""What programs do, as far as the order sees it: random ones, tiny ones, and some with one feature each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from retrograde.transport.order import SOFT_STEP, STEP, Boundary, Gather, Reduce, Want


class Use(NamedTuple):
    """A page is needed."""

    unit: int


class Contribute(NamedTuple):
    """A gradient is there."""

    unit: int
    value: int
    uses: bytes = b""


class Barrier(NamedTuple):
    """Of the user's own: the order knows nothing of it."""

    number: int


class Sync(NamedTuple):
    """The user waits for the whole device, what was issued in advance included."""

    whole: bool = True


class Meet(NamedTuple):
    boundary: Boundary
    name: str = ""


Event = Use | Contribute | Barrier | Sync | Meet
Program = list[Event]


def passes(units: Sequence[int], value: int, backward: bool = True) -> Program:
    """A forward, and a backward that needs the pages again."""
    events: Program = [Use(unit) for unit in units]
    if backward:
        for unit in reversed(units):
            events += [Use(unit), Contribute(unit, value)]
    return events


def guess(units: Sequence[int]) -> tuple[Want, ...]:
    """What is expected of a model before its first step: forward in the order of modules, backward in reverse."""
    wants: list[Want] = [Gather(unit) for unit in units]
    for unit in reversed(units):
        wants += [Gather(unit), Reduce(unit)]
    return tuple(wants)


# ---- random programs
class _Draw:
    """Programs of some steps; mostly alike on all ranks, sometimes not."""

    def __init__(self, rng: random.Random, ranks: int) -> None:
        self.rng = rng
        self.ranks = ranks
        self.units = rng.randint(1, 5)
        self.steps = rng.randint(2, 6)
        every = list(range(self.units))
        half = self.units // 2
        self.kinds = [every] if rng.random() < 0.7 or self.units < 2 else [every[:half], every[half:]]
        self.experts = {rng.randrange(self.units)} if rng.random() < 0.3 else set()
        self.captured = {rng.randrange(self.units)} if rng.random() < 0.15 else set()
        self.strange = rng.choice([0, 0.2, 0.6])
        self.barriers = 0

    def programs(self) -> list[Program]:
        programs: list[Program] = [[] for _ in range(self.ranks)]
        for step in range(self.steps + 1):
            last = step == self.steps
            parts = self._step(self.kinds[step % len(self.kinds)], last)
            self._insert_barriers(parts)
            for program, part in zip(programs, parts, strict=True):
                program += part + ([] if last else [Meet(STEP, f"step {step}")])
        return programs

    def _step(self, base: list[int], last: bool) -> list[Program]:
        rng = self.rng
        backwards = 0 if last else rng.choice([1, 1, 2])
        odd = rng.random() < self.strange
        evaluations = rng.randint(1, 3) if rng.random() < 0.2 else 0
        meetings = rng.choice([0, 0, 0, 1]) if not last else 0
        longer = last and rng.random() < 0.2  # an inference loop without steps
        parts = []
        for _ in range(self.ranks):
            part = passes(base, 0, False) * evaluations
            order, mine = self._stray(part, base, backwards) if odd and rng.random() < 0.6 else (base, backwards)
            for _ in range(mine):
                part += self._backward(order, odd)
            part += passes(base, 0, False) * (6 if longer else 0)
            extra = rng.random() < 0.2 and odd and not last
            part += [Meet(SOFT_STEP, "a value")] * (meetings + extra)
            if rng.random() < 0.3:
                part.insert(rng.randint(0, len(part)), Sync())
            parts.append(part)
        return parts

    def _stray(self, part: Program, base: list[int], backwards: int) -> tuple[list[int], int]:
        """Something that this rank does otherwise."""
        rng = self.rng
        order = list(base)
        match rng.choice(["skip", "swap", "more", "fewer", "evaluate", "none"]):
            case "skip":
                order.remove(rng.choice(order))
            case "swap":
                rng.shuffle(order)
            case "evaluate":
                part += passes(base, 0, False) * rng.randint(1, 2)
            case "more":
                return order, backwards + (backwards > 0)
            case "fewer":
                return order, max(0, backwards - 1)
            case "none":
                return order, 0
        return order, backwards

    def _backward(self, order: Sequence[int], odd: bool) -> Program:
        rng = self.rng
        used = [unit for unit in order if unit not in self.experts or rng.random() < 0.5]
        events: Program = [Use(unit) for unit in used]
        for unit in reversed(used):
            if rng.random() < 0.97 or not odd:
                events.append(Use(unit))
            uses = b"\1" if unit in self.captured and rng.random() < 0.5 else b""
            events.append(Contribute(unit, rng.randint(1, 999), uses))
        return events

    def _insert_barriers(self, parts: list[Program]) -> None:
        """Anywhere between the boundaries, the same number on each rank."""
        if any(isinstance(event, Meet) for part in parts for event in part):
            return  # barriers on both sides of a meeting would be a program that hangs by itself
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            self.barriers += 1
            for part in parts:
                after = [i + 1 for i, event in enumerate(part) if isinstance(event, Barrier)]
                low = max(after, default=0)
                place = self.rng.choice([low, len(part), self.rng.randint(low, len(part))])
                part.insert(place, Barrier(self.barriers))


def random_programs(rng: random.Random, ranks: int) -> list[Program]:
    return _Draw(rng, ranks).programs()


# ---- tiny programs, for all schedules of them
def tiny(text: str) -> list[Program]:
    """g0: use unit 0, r0: contribute to it, b: the user's barrier, s: step, m: meeting; a slash between ranks."""

    def event(word: str, value: int) -> Event:
        match word[0]:
            case "g":
                return Use(int(word[1:]))
            case "r":
                return Contribute(int(word[1:]), value)
            case "b":
                return Barrier(1)
            case "m":
                return Meet(SOFT_STEP, "a value")
        return Meet(STEP)

    ranks = [part.split() for part in text.split("/")]
    return [[event(word, 10 * rank + i) for i, word in enumerate(words)] for rank, words in enumerate(ranks)]


TINY = (
    "g0 r0 s g0 r0 s / g0 r0 s g0 r0 s",
    "g0 r0 s g0 r0 s / g0 r0 s s",
    "g0 g1 s g0 g1 s / g0 g1 s g1 g0 s",
    "r0 s b r0 s / r0 s r0 b s",
    "g0 s g0 g0 b s / g0 s b g0 s",
    "g0 r0 r0 s r0 s / g0 r0 r0 s r0 r0 s",
    "g0 r0 s g0 g0 r0 s / g0 r0 s g0 r0 s",
    "g0 r0 m s / g0 r0 s",
    "r0 m r0 s / m r0 r0 s",
    "g0 s g0 s / g0 s g0 s / g0 s s",
)


# ---- programs with one feature each
EVERY = list(range(6))  # units


class Bound(NamedTuple):
    """In these steps at most so many control messages, one-sided wants and time-outs, but for some exceptions."""

    steps: Sequence[int]
    control: int
    one_sided: int
    time_outs: int
    exceptions: int = 0


class Feature(NamedTuple):
    programs: list[Program]
    bounds: list[Bound]


class _Build:
    """Programs of some steps over six units on each rank."""

    def __init__(self, ranks: int, steps: int) -> None:
        self.ranks = ranks
        self.steps = range(steps)
        self.agreement = 2 * (ranks - 1)  # messages of a step

    def programs(self, step: Callable[[int, int], Program]) -> list[Program]:
        return [[event for t in self.steps for event in [*step(t, r), Meet(STEP)]] for r in range(self.ranks)]

    def alike(self) -> dict[str, Feature]:
        """All ranks do the same."""
        agreement, steps = self.agreement, self.steps
        twenty = {4: 20, 8: 20, 12: 20}
        some = {4: 20, 8: 30, 12: 25}
        return {
            "all ranks alike": Feature(self.programs(lambda t, r: passes(EVERY, r)), [Bound(steps, agreement, 0, 0)]),
            "two backwards": Feature(
                self.programs(lambda t, r: passes(EVERY, r) * 2),
                [Bound(steps, agreement, 0, 0, 1), Bound([0], 3 * agreement, 0, 0)],
            ),
            "GAN, two kinds of steps": Feature(
                self.programs(lambda t, r: (passes(EVERY[:3], r) if t % 2 == 0 else []) + passes(EVERY[3:], r)),
                [Bound(steps[4:], agreement, 0, 0)],
            ),
            "all evaluate 20 batches at steps 4, 8, 12": Feature(
                self.programs(lambda t, r: evaluations(twenty.get(t, 0)) + passes(EVERY, r)),
                [Bound(steps, 3 * agreement, 0, 0), Bound(steps[9:16], agreement, 0, 0)],
            ),
            "all evaluate 20, 30, 25 batches": Feature(
                self.programs(lambda t, r: evaluations(some.get(t, 0)) + passes(EVERY, r)),
                [Bound(steps, 4 * agreement, 0, 0)],
            ),
            "all clip: a meeting before each step": Feature(
                self.programs(lambda t, r: [*passes(EVERY, r), Meet(SOFT_STEP, "a norm")]),
                [Bound(range(2 * len(steps)), agreement, 0, 0)],
            ),
        }

    def strays(self) -> dict[str, Feature]:
        """One rank does otherwise now and then."""
        odd = (4, 6, 8)

        def alone(t: int, r: int) -> Program:
            return evaluations(3 * (r == 0 and t in odd))

        return {
            "rank 1 skips unit 2 at step 6": Feature(
                self.programs(lambda t, r: passes([u for u in EVERY if (u, r, t) != (2, 1, 6)], r)),
                self._but_for([6], 13),
            ),
            "rank 2 does one backward fewer at step 6": Feature(
                self.programs(lambda t, r: passes(EVERY, r) * (1 if (r, t) == (2, 6) else 2)),
                self._but_for([0, 6], 0),
            ),
            "rank 0 evaluates alone at steps 4, 6, 8": Feature(
                self.programs(lambda t, r: alone(t, r) + passes(EVERY, r)), self._but_for(odd, 36)
            ),
            "the same while others sit in a barrier": Feature(
                self.programs(lambda t, r: [*alone(t, r), Barrier(t), *passes(EVERY, r)]), self._but_for(odd, 36)
            ),
            "an inference loop after a detour": Feature(self._inference(), [Bound([1], 60, 300, self.ranks)]),
        }

    def _but_for(self, steps: Sequence[int], one_sided: int) -> list[Bound]:
        """Nothing but the agreement, except in these steps."""
        there = Bound(steps, 3 * self.agreement, one_sided, self.ranks)
        return [there, Bound(self.steps, self.agreement, 0, 0, len(steps))]

    def _inference(self) -> list[Program]:
        """One rank skips a unit once, and then all evaluate for long and without a step."""
        start = [*passes(EVERY, 1), Meet(STEP)]
        usual = start + evaluations(61)
        strayed = start + passes(EVERY[1:], 0, False) + evaluations(60)
        return [strayed if rank == 1 else usual for rank in range(self.ranks)]

    def differing(self) -> dict[str, Feature]:
        """Ranks use some units differently all the time."""
        rng = random.Random(7)
        use = [[set(rng.sample([4, 5], rng.choice([0, 1, 1, 2]))) for _ in range(self.ranks)] for _ in self.steps]
        agreement = self.agreement
        afterwards = self.steps[4:]
        return {
            "experts that ranks use differently": Feature(
                self.programs(lambda t, r: passes([u for u in EVERY if u < 4 or u in use[t][r]], r)),
                [Bound(self.steps, 2 * agreement, 30, 0), Bound(afterwards, agreement, 6 * self.ranks, 0)],
            ),
            "rank 1 always swaps units 2 and 3": Feature(
                self.programs(lambda t, r: passes([0, 1, 3, 2, 4, 5] if r == 1 else EVERY, r)),
                [Bound(self.steps, 3 * agreement, 72, 3), Bound(afterwards, agreement, 6 * self.ranks, 0, 3)],
            ),
        }


def evaluations(times: int) -> Program:
    return passes(EVERY, 0, False) * times


def features(ranks: int = 4, steps: int = 36) -> dict[str, Feature]:
    build = _Build(ranks, steps)
    return build.alike() | build.strays() | build.differing()
