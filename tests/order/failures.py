"""Ranks that fail in the middle of a random program: every wait of the others ends, with the cause."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from retrograde.transport.order import Participant, Tree
from tests.order.mutants import FAILURES, Mutant
from tests.order.programs import random_programs
from tests.order.schedules import broken_bounds, random_setting, run_random
from tests.order.world import Choice, Hang, Maker, State, World


class Failure(NamedTuple):
    """What happens to a rank, and when."""

    kind: str  # "raises": it says so; "dies": it says nothing; "lost": its neighbours in the tree notice
    rank: int
    after: int

    def strike(self, world: World) -> None:
        victim = world.ranks[self.rank]
        if victim.state in (State.END, State.ABORTED):
            return
        if self.kind == "raises":
            victim.do(world, victim.order.fail(f"rank {self.rank}: ValueError: no more data"))
            return
        victim.state = State.DEAD
        if self.kind == "lost":
            tree = Tree(world.size, world.setting.policy.fan_out)
            parent = [tree.parent(self.rank)] if self.rank else []
            for near in [*parent, *tree.children(self.rank)]:
                rank = world.ranks[near]
                rank.do(world, rank.order.fail(f"rank {near}: the connection to rank {self.rank} was lost"))


def run_failing(seed: int, participant: Maker = Participant) -> World:
    rng = random.Random(seed)
    ranks = 2 + seed % 4
    programs = random_programs(rng, ranks)
    setting = random_setting(rng, seed, ranks)
    setting.participant = participant
    world = World(programs, setting)
    failure = Failure(rng.choice(["raises", "dies", "lost"]), rng.randrange(ranks), rng.randint(1, 300))
    for turn in range(20_000):
        if turn == failure.after:
            failure.strike(world)
        choices = _choices(world, rng)
        if not choices:
            _check_end(world, failure)
            return world
        world.do(rng.choice(choices))
    raise AssertionError("no end")


def how_caught(mutant: Mutant, seeds: Sequence[int] = range(1500)) -> str:
    """The first thing that goes wrong without a rule; empty if nothing does."""
    if mutant.shown_by and mutant.shown_by != FAILURES:
        return "; ".join(broken_bounds(mutant.shown_by, mutant.fan_out, participant=mutant.participant))
    program = run_failing if mutant.shown_by else run_random
    for seed in seeds:
        try:
            program(seed, mutant.participant)
        except AssertionError as error:
            return f"program {seed}: {error}"
    return ""


def _choices(world: World, rng: random.Random) -> list[Choice]:
    now = world.choices()
    if now and rng.random() > 0.01:
        return now
    return world.timers() or now or world.limits()


def _check_end(world: World, failure: Failure) -> None:
    """Those in a barrier of the user's own are the user's."""
    over = (State.END, State.ABORTED, State.BARRIER, State.DEAD)
    if not all(rank.state in over for rank in world.ranks):
        raise Hang(f"{failure}: {[(rank.state.name, rank.cause) for rank in world.ranks]}")
    for rank in world.ranks:
        if rank.state is State.ABORTED:
            named = re.search(rf"\b{failure.rank}\b", rank.cause) or "by way of rank" in rank.cause
            assert named, f"{failure}: rank {rank.rank} says: {rank.cause}"
            said = {"raises": "no more data", "lost": "was lost", "dies": "waited"}[failure.kind]
            assert said in rank.cause, f"{failure}: rank {rank.rank} says: {rank.cause}"
