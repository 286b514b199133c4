"""The parts of the order by themselves."""

from __future__ import annotations

import ast
import random
from functools import partial, reduce
from pathlib import Path

import msgspec
import pytest

import retrograde.transport.order as order
from retrograde.transport.order import (
    SOFT_STEP,
    STEP,
    Abort,
    Gather,
    Issue,
    MeetingPlace,
    OrderPolicy,
    Participant,
    Passed,
    Patience,
    Reduce,
    Send,
    Serve,
    Settle,
    Tree,
    decode,
    encode,
)
from retrograde.transport.order.messages import Arrive, Grant, Nudge, Surprise, Tally, Usage
from retrograde.transport.order.predictor import Predictor
from retrograde.transport.order.sequence import AgreedSequence
from retrograde.transport.order.verdicts import common_boundary, merge_arrivals, merge_nudges, merge_surprises
from tests.order.programs import guess


# ---- what it is made of
def test_the_order_knows_no_torch_threads_sockets_or_clocks() -> None:
    allowed = {
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "hashlib",
        "itertools",
        "msgspec",
        "retrograde",
        "typing",
        "zlib",
    }
    room = Path(order.__file__).parent
    for path in [*room.glob("*.py"), room.parent / "records.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= allowed
            inside = [name for name in names if name.startswith("retrograde")]
            assert all(
                name.startswith(("retrograde.transport.order", "retrograde.transport.records")) for name in inside
            )


# ---- prediction
@pytest.mark.parametrize("seed", range(20))
def test_who_accepts_predictions_comes_to_what_was_foretold(seed: int) -> None:
    rng = random.Random(seed)
    predictor = Predictor(1 << 20)
    for _ in range(300):
        predictor.append(rng.randrange(4))
        foretold = [predictor.peek(i) for i in range(40)]
    if foretold[0] is None:
        return
    for expected in foretold:
        assert predictor.peek() == expected
        assert expected is not None
        predictor.append(expected)


def test_what_was_seen_is_foretold_from_its_longest_ending() -> None:
    predictor = Predictor(1 << 20, [1, 2, 3, 7, 2, 3, 8, 1, 2, 3])
    assert predictor.peek() == 7  # after 1 2 3, although 2 3 was last followed by 8


@pytest.mark.parametrize("has_steps", (True, False))
def test_the_past_is_bounded(has_steps: bool) -> None:
    """Also in a loop without a boundary, and with new uses in every round."""
    sequence = AgreedSequence(OrderPolicy(generation=50, mark=16), guess(range(3)))
    for turn in range(400):
        wants = [*guess(range(3)), Reduce(9, str(turn).encode())]
        for entry in [*wants, STEP] if has_steps else wants:
            sequence.consume(entry)
    sizes = sequence.sizes()
    assert sizes["past"] <= 2 * 50 + 16 + 11
    assert sizes["words"] <= sizes["past"]
    assert sequence.length == (0 if has_steps else 400 * 10)


def test_prefetches_are_issued_ahead_and_dropped_at_a_step() -> None:
    sequence = AgreedSequence(OrderPolicy(depth=2), guess(range(3)))
    first = sequence.consume(Gather(0))
    assert [call.want for call in first.issued] == [Gather(0), Gather(1), Gather(2)]
    second = sequence.consume(Gather(1))
    assert second.call == first.issued[1]
    assert [call.want for call in second.issued] == [Gather(2)]  # of the backward, which begins with it
    assert [call.number for call in first.issued + second.issued] == [0, 1, 2, 3]
    assert sequence.consume(STEP).dropped == (first.issued[2], second.issued[0])


# ---- the tree
@pytest.mark.parametrize("fan_out", (1, 2, 3, 32))
@pytest.mark.parametrize("world", (1, 2, 5, 33, 34, 100))
def test_every_rank_is_once_in_the_tree(world: int, fan_out: int) -> None:
    tree = Tree(world, fan_out)
    below = [child for rank in range(world) for child in tree.children(rank)]
    assert sorted(below) == list(range(1, world))
    assert all(rank in tree.children(tree.parent(rank)) for rank in range(1, world))
    for rank in range(world):
        assert tree.size(rank) == 1 + sum(tree.size(child) for child in tree.children(rank))
    assert tree.size(0) == world


def test_the_depth_of_the_tree_grows_as_a_logarithm() -> None:
    assert [Tree(world, 32).depth for world in (1, 33, 34, 1057, 1058, 16384)] == [0, 1, 2, 2, 3, 3]


def _arrival(rng: random.Random) -> Arrive:
    usage = Usage(rng.randrange(3), rng.randrange(3), rng.randrange(3))
    rank = rng.randrange(1 << 30)
    place = MeetingPlace(rank, rng.choice([STEP, SOFT_STEP]), rng.choice("ab"))
    tallies = tuple(Tally(unit, usage, usage, rng.random() < 0.5) for unit in sorted(rng.sample(range(4), 2)))
    loud, denied = rng.random() < 0.5, rng.random() < 0.5
    putters = (rank,) if rng.random() < 0.5 else ()
    return Arrive(3, 1, 0, 0, rng.randrange(9), loud, denied, rng.randrange(2), putters, (place,), tallies)


@pytest.mark.parametrize("seed", range(30))
def test_verdicts_do_not_depend_on_how_they_are_folded(seed: int) -> None:
    rng = random.Random(seed)
    want = [Gather(0), Gather(1)]
    surprises = [Surprise(3, 1, rng.randrange(2), rng.choice(want)) for _ in range(3)]
    nudges = [Nudge(3, 1, rng.randrange(3), rng.randrange(9)) for _ in range(3)]
    arrivals = [_arrival(rng) for _ in range(3)]
    merge = partial(merge_arrivals, 2)
    for merges, (a, b, c) in ((merge_surprises, surprises), (merge_nudges, nudges), (merge, arrivals)):
        assert merges(merges(a, b), c) == merges(a, merges(b, c))  # type: ignore[operator]
        assert merges(a, b) == merges(b, a)  # type: ignore[operator]


def test_one_rank_at_a_meeting_makes_no_step_of_it() -> None:
    """However many names the steps of the others have."""
    places = [MeetingPlace(rank, STEP, f"step {rank}") for rank in range(9)] + [MeetingPlace(9, SOFT_STEP, "a value")]
    arrivals = [Arrive(3, 1, 0, 0, 0, True, False, 0, (), (place,), ()) for place in places]
    merged = reduce(partial(merge_arrivals, 64), arrivals)
    assert len(merged.places) == 4
    assert common_boundary(merged.places) == SOFT_STEP


# ---- a rank alone
def test_a_world_of_one_rank() -> None:
    alone = Participant(0, 1, OrderPolicy())
    effects = alone.want(Gather(5))
    assert [type(effect) for effect in effects if isinstance(effect, Issue | Serve)] == [Issue, Serve]
    assert isinstance(alone.arrive(STEP, "step")[-1], Settle)
    assert alone.rest()[-1] == Passed(STEP)


def test_a_rank_that_has_failed_says_why() -> None:
    rank = Participant(0, 1, OrderPolicy())
    assert Abort("no more data") in rank.fail("no more data")
    assert rank.want(Gather(0)) == rank.arrive(STEP) == rank.rest() == [Abort("no more data")]


def test_wrong_use_names_the_rank_and_where_it_is() -> None:
    rank = Participant(3, 5, OrderPolicy())
    rank.want(Gather(7))
    with pytest.raises(RuntimeError, match=r"rank 3: it is waiting .* the gather of unit 7, in period 0"):
        rank.want(Gather(7))


def test_what_ranks_must_share_has_a_fingerprint() -> None:
    made = Participant(0, 2, OrderPolicy(), guess(range(3))).fingerprint
    assert made == Participant(1, 2, OrderPolicy(patience=Patience(nudge=9)), guess(range(3))).fingerprint
    assert made != Participant(1, 2, OrderPolicy(depth=2), guess(range(3))).fingerprint
    assert made != Participant(1, 2, OrderPolicy(), guess(range(4))).fingerprint


def test_patience() -> None:
    patience = Patience()
    assert patience.for_surprise(steps=0, in_vain=0) == 180
    assert patience.for_surprise(steps=3, in_vain=0) == 8
    assert patience.for_surprise(steps=3, in_vain=2) == 2
    assert patience.for_surprise(steps=3, in_vain=99) == patience.least


# ---- messages
def test_messages_of_a_usual_step_are_small() -> None:
    rank = Participant(1, 2, OrderPolicy(), guess(range(100)))
    for want in guess(range(100)):
        rank.want(want)
    [arrival] = [effect.message for effect in rank.arrive(STEP, "step 7") if isinstance(effect, Send)]
    assert decode(encode(arrival)) == arrival
    assert len(encode(arrival)) <= 64


@pytest.mark.parametrize(
    "wrong",
    (
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["grant", 0, 0]),
        msgspec.msgpack.encode(["grant", -1, 0, ["gather", 0]]),
        msgspec.msgpack.encode(["grant", 0, 0, ["gather", -1]]),
        msgspec.msgpack.encode(["grant", 0, 0, ["step"]]),
        msgspec.msgpack.encode(["grant", 0, 0, ["reduce", 0, b"x" * 5000]]),
        msgspec.msgpack.encode(["failed", "x" * 5000]),
        msgspec.msgpack.encode(["run", "rm"]),
        msgspec.msgpack.encode({"tag": "grant"}),
    ),
)
def test_what_is_no_message_is_refused(wrong: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(wrong)


def test_a_want_with_its_uses_travels() -> None:
    grant = Grant(3, 4, Reduce(5, bytes(range(9))))
    assert decode(encode(grant)) == grant
