"""From turns to figures. A machine that slows down for a while slows both sides of a ratio: those to the limit are
taken between turns that follow each other, those between engines within a repeat, a few minutes at most apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from benchmarks.protocol import Counted, Ready, TurnTaken

LIMIT = "alone"  # what the name of the limit begins with
_LONG_ENOUGH = 5.0  # seconds asleep, before a share of them says anything
# Relative; engines sum in other orders, and in bf16 cast at other places, but nobody may train something else.
_LOSS_TOLERANCE = 1e-3
_LOSS_TOLERANCE_BF16 = 3e-2


@dataclass(frozen=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    @classmethod
    def of_median(cls, values: list[float]) -> Spread:
        """With the interval in which the true median lies, 19 times of 20: all values but the outermost, as many on
        each side as may be left out. With less than 6 values it is all of them, and less sure."""
        ordered, number = sorted(values), len(values)
        outside = 0
        while _chance_to_miss(number, outside + 1) <= 0.05:
            outside += 1
        return cls(median(values), ordered[outside], ordered[number - 1 - outside])


def _chance_to_miss(number: int, outside: int) -> float:
    """That at most `outside` of so many values are above the true median, or below it."""
    return 2 * sum(math.comb(number, each) for each in range(outside + 1)) / 2**number


@dataclass
class Record:
    """Everything one contender's ranks reported; `turns` is indexed by repeat, then rank. The limit has one before
    every turn of another contender."""

    name: str
    ready: list[Ready]
    turns: list[list[TurnTaken]] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)
    over_limit: list[float] = field(default_factory=list)  # by repeat: how many times longer than the limit's before it

    def turn_seconds(self) -> list[float]:
        """The median step of each repeat. A step ends when its last rank ends it."""
        return [_median_step(turn) for turn in self.turns]

    def follow(self, limit: Record, turn: list[TurnTaken]) -> None:
        """A turn, just after one of the limit."""
        self.turns.append(turn)
        self.over_limit.append(_median_step(turn) / _median_step(limit.turns[-1]))

    def step_seconds(self) -> Spread:
        return Spread.of(self.turn_seconds())

    def over(self, other: Record) -> Spread:
        """How many times longer a step takes than the other's."""
        pairs = zip(self.turn_seconds(), other.turn_seconds(), strict=False)
        return Spread.of([mine / theirs for mine, theirs in pairs])

    def losses(self) -> list[float]:
        """The loss of every step, averaged over ranks."""
        steps = (ranks for turn in self.turns for ranks in zip(*(rank.losses for rank in turn), strict=True))
        return [sum(ranks) / len(ranks) for ranks in steps]

    def sent_bytes(self) -> float:
        """Bytes per step of the rank that sends most."""
        by_rank = zip(*self.turns, strict=True)
        return max(median(turn.sent_bytes_per_step for turn in turns) for turns in by_rank)

    def calls(self) -> dict[str, int]:
        return self.counted[0].calls if self.counted else {}

    def exchanges(self) -> dict[str, int]:
        return self.counted[0].exchanges if self.counted else {}

    def peak_rss(self) -> int:
        return max(rank.peak_rss for turn in self.turns for rank in turn)

    def own_peak(self) -> int:
        """Peak beyond what the process held before the model existed: python, torch, the engine's imports."""
        last = self.turns[-1]
        return max(rank.peak_rss - ready.base_rss for rank, ready in zip(last, self.ready, strict=True))

    def idle_load(self) -> float:
        """CPU used between turns, as a share of one core: it would slow everybody else's turns."""
        later = [rank for turn in self.turns[1:] for rank in turn]
        idle = sum(rank.idle_seconds for rank in later)
        return sum(rank.idle_cpu_seconds for rank in later) / idle if idle > _LONG_ENOUGH else 0.0


def _median_step(turn: list[TurnTaken]) -> float:
    return median(max(ranks) for ranks in zip(*(rank.seconds for rank in turn), strict=True))


@dataclass(frozen=True)
class Bar:
    claim: str
    ours: float
    theirs: float

    @property
    def met(self) -> bool:
        return self.ours < self.theirs


@dataclass(frozen=True)
class Ceiling:
    """A step may take so many times as long as the limit's."""

    name: str
    ceiling: float
    ratio: Spread  # of the median

    @property
    def met(self) -> bool:
        """A ceiling within the interval counts only if that is narrow."""
        narrow = self.ratio.high - self.ratio.low < _NARROW
        return self.ratio.high <= self.ceiling or (narrow and self.ratio.low <= self.ceiling)


_NARROW = 0.04
_AT_MOST = {
    "retrograde-1": 1.06,
    "retrograde-2": 1.06,
    "retrograde-3": 1.10,
    "retrograde-1-gloo": 1.2,
    "retrograde-2-gloo": 1.2,
    "retrograde-3-gloo": 1.4,
}
_FASTER_THAN = {
    "retrograde-1": ("ddp",),
    "retrograde-2": ("ddp", "fsdp2", "deepspeed-2"),
    "retrograde-3": ("ddp", "fsdp2-reshard", "deepspeed-3"),
    "retrograde-1-gloo": ("fsdp2", "deepspeed-1"),
    "retrograde-2-gloo": ("fsdp2", "deepspeed-2"),
    "retrograde-3-gloo": ("fsdp2-reshard", "deepspeed-3"),
    "retrograde-3-bf16": ("fsdp2-reshard-bf16", "deepspeed-3-bf16"),
}
_SMALLER_THAN = {
    "retrograde-3": ("fsdp2-reshard", "fsdp2", "deepspeed-3"),
    "retrograde-3-bf16": ("fsdp2-reshard-bf16", "deepspeed-3-bf16"),
}


def ceilings(records: dict[str, Record]) -> list[Ceiling]:
    """What a step may take, for the contenders that ran."""
    ratios = {name: records[name].over_limit for name in _AT_MOST if name in records}
    return [Ceiling(name, _AT_MOST[name], Spread.of_median(found)) for name, found in ratios.items() if found]


def bars(records: dict[str, Record]) -> list[Bar]:
    """What the project promises, for the contenders that ran. Times in ms, memory in MiB."""
    found = []
    for ours, peers in _FASTER_THAN.items():
        for peer in peers:
            if ours in records and peer in records:
                mine = records[ours].step_seconds().median
                theirs = records[peer].step_seconds().median
                found.append(Bar(f"{ours} is faster than {peer}", 1e3 * mine, 1e3 * theirs))
    for ours, peers in _SMALLER_THAN.items():
        for peer in peers:
            if ours in records and peer in records:
                mine = records[ours].peak_rss() / 2**20
                theirs = records[peer].peak_rss() / 2**20
                found.append(Bar(f"{ours} peaks below {peer}", mine, theirs))
    return found


@dataclass(frozen=True)
class LossCheck:
    reference: str
    deviation: dict[str, float]  # largest relative difference over all steps

    def wrong(self) -> list[str]:
        return [name for name, far in self.deviation.items() if not far <= _tolerance(name)]


def _tolerance(name: str) -> float:
    return _LOSS_TOLERANCE_BF16 if name.endswith("bf16") else _LOSS_TOLERANCE


def check_losses(records: dict[str, Record]) -> LossCheck | None:
    """Everybody must have trained the same thing. `alone` does not average gradients and is left out."""
    trained = {name: record.losses() for name, record in records.items() if not name.startswith(LIMIT)}
    if not trained:
        return None
    reference = "ddp" if "ddp" in trained else next(iter(trained))
    expected = trained[reference]
    deviation = {
        name: max(abs(got - want) / abs(want) for got, want in zip(losses, expected, strict=False))
        for name, losses in trained.items()
    }
    return LossCheck(reference, deviation)
