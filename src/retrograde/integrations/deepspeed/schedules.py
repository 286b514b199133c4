"""The config's scheduler section: DeepSpeed's five schedules, as one torch scheduler.

A schedule is a function of the *iteration*: the number of updates so far, less one. Before the first update it is -1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from retrograde.integrations.deepspeed.config import Section
from retrograde.integrations.deepspeed.refusals import ConfigError, wrong

PerGroup = float | list[float]


def _of_group(value: PerGroup, group: int) -> float:
    return value[group] if isinstance(value, list | tuple) else value


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise wrong(f"scheduler.params.{name}", value, "is too small", "a number above 0")


class RateSchedule(Protocol):
    """A learning rate as a function of the step."""

    def rate(self, iteration: int, group: int, base: float) -> float:
        """The learning rate of a parameter group whose rate was `base` at the beginning."""


@dataclass(frozen=True)
class LRRangeTest:
    """DeepSpeed's schedule in which the rate grows, to find one that is too large."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def __post_init__(self) -> None:
        _positive("lr_range_test_step_size", self.lr_range_test_step_size)

    def rate(self, iteration: int, group: int, base: float) -> float:
        intervals = (iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return _of_group(self.lr_range_test_min_lr, group) * (1 + self.lr_range_test_step_rate * intervals)


@dataclass(frozen=True)
class OneCycle:
    """DeepSpeed's schedule in which the rate goes up, down, and then decays; the momentum goes the other way."""

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: float | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: float = 0.0

    def __post_init__(self) -> None:
        _positive("cycle_first_step_size", self.cycle_first_step_size)

    @property
    def _second(self) -> float:
        return self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size

    @property
    def _total(self) -> float:
        return self.cycle_first_step_size + self._second

    def _height(self, iteration: int) -> float:
        """The place in the cycle: from 0 at its bottom to 1 at its top."""
        at = (iteration + 1) % self._total
        if at <= self.cycle_first_step_size:
            part, stairs = at / self.cycle_first_step_size, self.cycle_first_stair_count
        else:
            second = self.cycle_second_stair_count
            part = (self._total - at) / self._second
            stairs = self.cycle_first_stair_count if second is None else second
        return math.floor(part * stairs) / stairs if stairs else part

    def _decays(self, iteration: int) -> float | None:
        """The number of decay intervals since the cycle; None inside it."""
        if iteration < self._total:
            return None
        return (iteration - self._total + 1) / self.decay_step_size if self.decay_step_size else 0.0

    def rate(self, iteration: int, group: int, base: float) -> float:
        low, high = _of_group(self.cycle_min_lr, group), _of_group(self.cycle_max_lr, group)
        decays = self._decays(iteration)
        if decays is None:
            return low + (high - low) * self._height(iteration)
        return low / (1 + self.decay_lr_rate * decays)

    def beta(self, iteration: int, group: int) -> float:
        low, high = _of_group(self.cycle_min_mom, group), _of_group(self.cycle_max_mom, group)
        if iteration < 0:
            return low
        decays = self._decays(iteration)
        if decays is None:
            return high - (high - low) * self._height(iteration)
        return high * (1 + self.decay_mom_rate * decays)


def _warmed_up(iteration: int, steps: int, kind: str) -> float:
    """The share of the full rate: from 0 to 1 over the steps."""
    return iteration / steps if kind == "linear" else math.log(iteration + 1) / math.log(steps)


def _check_warmup(steps: int, kind: str) -> None:
    _positive("warmup_num_steps", steps)
    if kind not in ("log", "linear"):
        raise wrong("scheduler.params.warmup_type", kind, "is not known", '"log" or "linear"')


@dataclass(frozen=True)
class WarmupLR:
    """DeepSpeed's schedule in which the rate grows to its full value, and stays."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_num_steps, self.warmup_type)

    def rate(self, iteration: int, group: int, base: float) -> float:
        low = _of_group(self.warmup_min_lr, group)
        high = base if self.warmup_max_lr is None else _of_group(self.warmup_max_lr, group)
        return low if iteration < 0 else low + (high - low) * self._part(iteration)

    def _part(self, iteration: int) -> float:
        steps = max(2, self.warmup_num_steps)
        return _warmed_up(iteration, steps, self.warmup_type) if iteration < steps else self._after(iteration, steps)

    def _after(self, iteration: int, steps: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """DeepSpeed's schedule in which the rate grows, and falls to zero along a line."""

    total_num_steps: int
    warmup_max_lr: PerGroup | None = 0.001

    def _after(self, iteration: int, steps: int) -> float:
        return max(0.0, (self.total_num_steps - iteration) / max(1.0, self.total_num_steps - steps))


@dataclass(frozen=True)
class WarmupCosineLR:
    """DeepSpeed's schedule in which the rate grows, and falls along a cosine."""

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_num_steps, self.warmup_type)

    def rate(self, iteration: int, group: int, base: float) -> float:
        return 0.0 if iteration < 0 else base * self._ratio(iteration)

    def _ratio(self, iteration: int) -> float:
        steps, low = max(2, self.warmup_num_steps), self.warmup_min_ratio
        if iteration < steps:
            return low + _warmed_up(iteration, steps, self.warmup_type) * (1 - low)
        done = min(1.0, (iteration - steps + 1) / max(1, self.total_num_steps - steps))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)


SCHEDULES: dict[str, Callable[..., RateSchedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


class Scheduled(LRScheduler):
    """Sets each group's rate after every update, and with OneCycle its betas, of which the second is always 0.99."""

    def __init__(self, optimizer: Optimizer, schedule: RateSchedule) -> None:
        self.schedule = schedule
        self.momentum = schedule if isinstance(schedule, OneCycle) and schedule.cycle_momentum else None
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Any]:
        iteration = self.last_epoch - 1
        if self.momentum is not None:
            for number, group in enumerate(self.optimizer.param_groups):
                if "betas" in group:
                    group["betas"] = (self.momentum.beta(iteration, number), 0.99)
        return [self.schedule.rate(iteration, number, float(base)) for number, base in enumerate(self.base_lrs)]

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_epoch - 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_batch_iteration"] + 1
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def make_scheduler(section: Section, optimizer: Optimizer) -> Scheduled:
    if section.type not in SCHEDULES:
        raise wrong("scheduler.type", section.type, "is not known", " or ".join(SCHEDULES))
    try:
        schedule = SCHEDULES[section.type](**section.params)
    except TypeError as error:
        raise ConfigError(f"scheduler.params: {section.type} refuses {section.params}: {error}") from error
    return Scheduled(optimizer, schedule)
