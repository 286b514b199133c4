"""Who goes next: random schedules, all schedules of a tiny program, and a patient one for counting messages."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from retrograde.transport.order import OrderPolicy, Participant
from retrograde.transport.order.sequence import AgreedSequence
from tests.order.programs import Program, features, guess, random_programs
from tests.order.world import Choice, Maker, Setting, World

LIMIT = 200_000


def simulate(world: World, rng: random.Random, impatience: float = 0.0) -> World:
    """To the end. Patience ends when nothing else can happen, and before that at random."""
    bias: dict[Choice, float] = {}
    for _ in range(LIMIT):
        now = world.choices()
        timers = world.timers() if not now or rng.random() < impatience else []
        if timers:
            world.do(timers[0] if not impatience else rng.choice(timers))
            continue
        if not now:
            world.check_end()
            return world
        if len(bias) < 64:
            bias.setdefault(rng.choice(now), rng.choice([0.02, 1, 1, 1]))
        world.do(_biased(now, bias, rng))
    raise AssertionError("no end")


def _biased(now: Sequence[Choice], bias: dict[Choice, float], rng: random.Random) -> Choice:
    """Some programs and channels are much slower than others."""
    choice = rng.choice(now)
    for _ in range(4):
        if rng.random() < bias.get(choice, 1):
            break
        choice = rng.choice(now)
    return choice


def random_setting(rng: random.Random, seed: int, ranks: int) -> Setting:
    policy = OrderPolicy(
        depth=rng.choice([0, 1, 1, 2]),
        horizon=rng.choice([3, 64]),
        fan_out=rng.choice([1, 2, 32, 32]),
        soften_after=rng.choice([2, 64]),
        generation=rng.choice([12, 32_768]),
        mark=rng.choice([5, 8_192]),
        most_names=rng.choice([0, 1, 64]),
    )
    group = 2 if ranks == 4 and rng.random() < 0.3 else 0
    expected = guess(range(5)) if rng.random() < 0.4 else ()
    return Setting(policy, runs_ahead=seed % 3 == 0, group=group, guess=expected)


def run_random(seed: int, participant: Maker = Participant, watches_all: bool = True) -> World:
    rng = random.Random(seed)
    ranks = 2 + seed % 4
    setting = random_setting(rng, seed, ranks)
    setting.participant = participant
    setting.watches_all = watches_all
    world = World(random_programs(rng, ranks), setting)
    return simulate(world, rng, rng.choice([0, 0.005, 0.1]))


# ---- counting
class StepCount(NamedTuple):
    control: int
    one_sided: int
    time_outs: int
    wants: int


def measure(programs: Sequence[Program], setting: Setting, seed: int = 1) -> list[StepCount]:
    """Of each period."""
    world = simulate(World(programs, setting), random.Random(seed))
    rows = []
    for _, found in sorted(world.per_period.items()):
        wants = found["collective"] + found["one-sided"]
        rows.append(StepCount(found["control"], found["one-sided"], found["time-outs"], wants))
    return rows


def broken_bounds(name: str, fan_out: int = 32, seed: int = 1, participant: Maker = Participant) -> list[str]:
    """Steps of the program with this feature in which more is said, or served one-sidedly, than should be."""
    feature = features()[name]
    setting = Setting(OrderPolicy(fan_out=fan_out), guess=guess(range(6)), participant=participant)
    rows = measure(feature.programs, setting, seed)
    found = []
    for bound in feature.bounds:
        off = [t for t in bound.steps if any(x > most for x, most in zip(rows[t], bound[1:4], strict=False))]
        if len(off) > bound.exceptions:
            found.append(f"{name}: steps {off}: {rows[off[0]]}")
    return found


# ---- all schedules
class Explored(NamedTuple):
    states: int
    all: bool


def explore(world: World, limit: int) -> Explored:
    """All schedules, in which patience may end at any moment. States that were seen before are not followed again."""
    stack = [pickle.dumps(world)]
    seen: set[int] = set()
    while stack and len(seen) < limit:
        state = stack.pop()
        world = pickle.loads(state)
        choices = world.choices() + world.timers()
        if not choices:
            world.check_end()
        for choice in choices:
            world = pickle.loads(state)
            world.do(choice)
            key = hash(_frozen(world))
            if key not in seen:
                seen.add(key)
                stack.append(pickle.dumps(world))
    return Explored(len(seen), not stack)


IGNORED = ("stats", "per_period", "setting", "program", "_policy")


def _frozen(value: object) -> object:
    if isinstance(value, AgreedSequence):
        return value.state()
    if isinstance(value, dict):
        return frozenset((key, _frozen(each)) for key, each in value.items() if each not in (deque(), 0))
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, list | tuple | deque):
        return tuple(map(_frozen, value))
    if type(value).__hash__ is object.__hash__ and hasattr(value, "__dict__"):
        return tuple((name, _frozen(each)) for name, each in vars(value).items() if name not in IGNORED)
    return value
