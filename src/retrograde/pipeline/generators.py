"""The named schedules. Each function makes the compute actions; the dry run proves their bubble and memory.

p ranks, v stages on each of them, m >= 2p-1 microbatches (interleaved: a multiple of p), F = I = W. The bubble is
a share of the work (see timeline.py), activations are in microbatches of a rank's whole share of the model:

    name               stages  bubble          activations
    gpipe              p       (p-1)/m         m
    1f1b               p       (p-1)/m         p
    interleaved-1f1b   vp      (p-1)/vm        p + (p-1)/v
    looped-bfs         vp      (p-1)/vm        m
    zb-h1              p       (p-1)/3m        p
    zb-h2              p       0               2p-1
    zb-v               2p      0               p
    dualpipe-v         2p      (p-1)/6m        p + 1/2               (m >= 2p)
    v-half             2p      (3p-5)/6m       (p+1)/2, rounded up   (p even and > 2; (3p-4)/6m for odd p)
    v-min              2p      (4p-5)/6m       (p+2)/3, rounded up

Microbatches go through every stage in order, backward too: weight gradients are then summed in the order of plain
gradient accumulation, and are equal to it bit for bit.

zb-h1, zb-h2 and zb-v are from "Zero Bubble Pipeline Parallelism", dualpipe-v is the V-shaped half of DualPipe
("DeepSeek-V3 Technical Report"), v-half and v-min are from "Pipeline Parallelism with Controllable Memory" (vshape.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat, zip_longest

from retrograde.errors import ScheduleError
from retrograde.pipeline.schedule import Action, ActionKind, Schedule
from retrograde.pipeline.vshape import dualpipe_v, v_half, v_min, zb_v


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    order = [(kind, k) for kind in (ActionKind.F, ActionKind.B) for k in range(microbatches)]
    lists = [tuple(Action(kind, rank, k) for kind, k in order) for rank in range(ranks)]
    return Schedule("gpipe", microbatches, tuple(range(ranks)), tuple(lists))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Rank r is p-r forwards ahead of its backwards."""
    lists = []
    for rank in range(ranks):
        forwards = [Action(ActionKind.F, rank, k) for k in range(microbatches)]
        backwards = [Action(ActionKind.B, rank, k) for k in range(microbatches)]
        lists.append(tuple(_one_for_one(forwards, backwards, ahead=ranks - rank)))
    return Schedule("1f1b", microbatches, tuple(range(ranks)), tuple(lists))


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Rank r has stages r, r+p, r+2p, ...; p microbatches go through all chunks before the next p start.

    The list is made for a multiple of p, and microbatches beyond the number are left out, which cannot make it hang.
    """
    groups = [range(k, k + ranks) for k in range(0, microbatches, ranks)]
    lists = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(ActionKind.F, s, k) for group in groups for s in stages for k in group]
        backwards = [Action(ActionKind.B, s, k) for group in groups for s in reversed(stages) for k in group]
        ahead = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
        full = _one_for_one(forwards, backwards, ahead)
        lists.append(tuple(action for action in full if action.microbatch in range(microbatches)))
    return Schedule("interleaved-1f1b", microbatches, tuple(range(ranks)) * chunks, tuple(lists))


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Breadth first: rank r has stages r, r+p, ...; all microbatches go through one before the first enters the next.

    Each stage is turned to once in forward and once in backward, so with sharded weights it is gathered twice a step.
    """
    lists = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(ActionKind.F, s, k) for s in stages for k in range(microbatches)]
        backwards = [Action(ActionKind.B, s, k) for s in reversed(stages) for k in range(microbatches)]
        lists.append((*forwards, *backwards))
    return Schedule("looped-bfs", microbatches, tuple(range(ranks)) * chunks, tuple(lists))


def _one_for_one(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    """Yield `ahead` forwards, then a backward and a forward in turn."""
    yield from forwards[:ahead]
    for pair in zip_longest(backwards, forwards[ahead:]):
        yield from (action for action in pair if action is not None)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B in which rank r does each W r microbatches late: p activations on every rank, and I never waits for W."""
    return _late_weights("zb-h1", microbatches, [(ranks - rank, rank) for rank in range(ranks)])


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Forwards fill the time until the first gradient can come back; 2p-1 activations on every rank."""
    return _late_weights("zb-h2", microbatches, [(2 * (ranks - rank) - 1, 2 * rank) for rank in range(ranks)])


def _late_weights(name: str, microbatches: int, shape: list[tuple[int, int]]) -> Schedule:
    """Make lists of F, I and W in turn. `shape` says for each rank how many F it is ahead of I, and W behind it."""
    lists = []
    for rank, (ahead, late) in enumerate(shape):
        forwards = [Action(ActionKind.F, rank, k) for k in range(microbatches)]
        inputs = [Action(ActionKind.I, rank, k) for k in range(microbatches)]
        weights = [Action(ActionKind.W, rank, k) for k in range(microbatches)]
        turns = zip_longest(inputs, chain(repeat(None, late), weights), forwards[ahead:])
        lists.append((*forwards[:ahead], *(action for action in chain(*turns) if action is not None)))
    return Schedule(name, microbatches, tuple(range(len(shape))), tuple(lists))


@dataclass(frozen=True)
class Generator:
    """A named schedule: how to make it, how many stages each rank has, and a line for people."""

    make: Callable[[int, int], Schedule]
    chunks: int
    about: str


GENERATORS = {
    "gpipe": Generator(gpipe, 1, "all forwards, then all backwards"),
    "1f1b": Generator(one_f_one_b, 1, "one forward, one backward in turn"),
    "interleaved-1f1b": Generator(interleaved_1f1b, 2, "1f1b, two stages per rank"),
    "looped-bfs": Generator(looped_bfs, 2, "breadth first, two stages per rank"),
    "zb-h1": Generator(zb_h1, 1, "1f1b with late weight gradients"),
    "zb-h2": Generator(zb_h2, 1, "filled with forwards"),
    "zb-v": Generator(zb_v, 2, "V: no bubble, 1f1b's activations"),
    "dualpipe-v": Generator(dualpipe_v, 2, "V: a forward beside a backward, in turn"),
    "v-half": Generator(v_half, 2, "V: half the activations"),
    "v-min": Generator(v_min, 2, "V: a third of the activations"),
}


def generate(name: str, ranks: int, microbatches: int) -> Schedule:
    """Make the schedule of this name; its number of stages is `ranks` times the chunks of its generator."""
    if name not in GENERATORS:
        raise ScheduleError(f"schedule={name!r} is not known; give one of {', '.join(GENERATORS)}")
    check_size(name, ranks, microbatches)
    return GENERATORS[name].make(ranks, microbatches)


def check_size(name: str, ranks: int, microbatches: int) -> None:
    """Raise unless there is something to schedule, and somebody to do it."""
    for argument, value in (("ranks", ranks), ("microbatches", microbatches)):
        if value < 1:
            raise ScheduleError(f"schedule '{name}': {argument}={value} must be at least 1")
