"""Pages and gradients go through their states in the order of the drawings; anything else raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograde.devices import Stream, streams_of
from retrograde.gradients.bucket import Bucket
from retrograde.gradients.gradient import Gradient, GradientState
from retrograde.layout import Grid, Layout
from retrograde.ledger import Ledger
from retrograde.pages import BufferPool, PageState, Unit
from retrograde.transport import FakeRanks, Key, Memory, Use
from tests.transport.shards import Shards

LAYOUT = Layout([("p", torch.Size([6]))], torch.float32, 2)
USES = (Use.ACCUMULATED,)


class Done:
    def wait(self, stream: Stream) -> None:
        pass

    def done(self) -> bool:
        return True


class Alone:
    """Coherence of pages that nobody else has."""

    def read(self, unit: Unit, page: Tensor, alone: bool) -> Done:
        return Done()

    def take_part(self, unit: Unit) -> None:
        raise AssertionError("nobody else reads")

    def writing(self, what: str, unit: Unit, slot: int) -> Any:
        raise AssertionError("nothing is edited here")

    editing = writing


def pool() -> BufferPool:
    host = streams_of(torch.device("cpu"))
    transport = FakeRanks(2).transport(Shards(), host, 1.0)
    return BufferPool(Memory.PAGE, transport, host, Ledger())


def unit(stays: bool = False) -> Unit:
    memory = torch.zeros(LAYOUT.padded_numel if stays else LAYOUT.shard_numel)
    shard = memory[LAYOUT.span(0)] if stays else memory
    leaf = nn.Parameter(shard[LAYOUT.piece(LAYOUT.slots[0], 0)])
    return Unit(0, "a unit", LAYOUT, [leaf], memory, Grid.line(0, 2), pool(), Alone())


# ---- pages
def test_the_life_of_a_page() -> None:
    made = unit()
    states = [made.page.state]
    made.load()
    states.append(made.page.state)
    made.finish_loading()
    states.append(made.page.state)
    made.load()  # it is stale, and somebody holds it
    made.finish_loading()
    assert made.drop_unless_held()
    states.append(made.page.state)
    assert states == [PageState.ABSENT, PageState.LOADING, PageState.READY, PageState.ABSENT]


def test_the_life_of_a_page_that_stays() -> None:
    made = unit(stays=True)
    assert made.page.state is PageState.ABSENT and made.stays
    for _ in range(2):
        made.load()
        made.finish_loading()
        assert made.page.state is PageState.AT_HOME
        assert not made.drop_unless_held()


def test_what_a_page_shows() -> None:
    """A stub of one element, then the page."""
    made = unit()
    (full,) = made.page.full_tensors
    assert full.shape == (6,) and full.untyped_storage().nbytes() == 4
    made.load()
    made.finish_loading()
    assert full.untyped_storage().data_ptr() == made.page.memory.untyped_storage().data_ptr()
    del full
    assert made.drop_unless_held()
    assert made.page.full_tensors[0].untyped_storage().nbytes() == 4


def test_a_page_that_is_held_is_not_dropped() -> None:
    made = unit()
    made.load()
    made.finish_loading()
    held = made.page.full_tensors[0][:2]
    assert not made.drop_unless_held() and made.page.state is PageState.READY
    del held
    assert made.drop_unless_held()


def test_illegal_transitions_of_a_page_raise() -> None:
    made = unit()
    with pytest.raises(RuntimeError, match="the page of unit a unit cannot become ABSENT: it is ABSENT"):
        made.page.drop()
    made.load()
    with pytest.raises(RuntimeError, match="cannot become LOADING: it is LOADING"):
        made.page.load(lambda into: Done())
    with pytest.raises(RuntimeError, match="cannot become ABSENT: it is LOADING"):
        made.page.drop()


def test_a_load_that_raises_leaves_the_page_absent() -> None:
    made = unit()

    def refuse(page: Tensor) -> Done:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        made.page.load(refuse)
    assert made.page.state is PageState.ABSENT
    made.load()
    made.finish_loading()
    assert made.page.state is PageState.READY


# ---- gradients
def gradient() -> Gradient:
    return Gradient(unit(), Bucket("a unit", LAYOUT, LAYOUT.dtype, pool(), {}))


def sent() -> Gradient:
    made = gradient()
    made.send(Key(0, 0, 0, 2), USES, torch.zeros(LAYOUT.shard_numel))
    return made


def test_what_comes_with_sending_is_not_there_before() -> None:
    for asked in (lambda made: made.key, lambda made: made.own, lambda made: made.uses):
        with pytest.raises(RuntimeError, match="a gradient of unit a unit has not been sent: it is FILLING"):
            asked(gradient())


def test_the_life_of_a_gradient() -> None:
    made = gradient()
    states = [made.state]
    made.send(Key(0, 0, 0, 2), USES, torch.zeros(LAYOUT.shard_numel))
    states.append(made.state)
    made.sum_up((True,))
    states.append(made.state)
    made.deliver()
    states.append(made.state)
    wanted = [GradientState.FILLING, GradientState.SENT, GradientState.SUMMED, GradientState.DELIVERED]
    assert states == wanted


@pytest.mark.parametrize("make", (gradient, sent))
def test_a_gradient_may_be_given_up_until_it_is_summed(make: Callable[[], Gradient]) -> None:
    made = make()
    made.give_up()
    assert made.state is GradientState.GIVEN_UP
    for late in (made.give_up, made.deliver, lambda: made.sum_up((True,))):
        with pytest.raises(RuntimeError, match="it is GIVEN_UP"):
            late()


@pytest.mark.parametrize(
    ("make", "wrong", "state"),
    [
        (gradient, lambda made: made.sum_up((True,)), "FILLING"),
        (gradient, lambda made: made.deliver(), "FILLING"),
        (sent, lambda made: made.deliver(), "SENT"),
        (sent, lambda made: made.send(Key(0, 0, 0, 4), USES, torch.zeros(4)), "SENT"),
    ],
)
def test_illegal_transitions_of_a_gradient_raise(
    make: Callable[[], Gradient], wrong: Callable[[Gradient], None], state: str
) -> None:
    made = make()
    with pytest.raises(RuntimeError, match=f"a gradient of unit a unit cannot become .*: it is {state}"):
        wrong(made)
    assert made.state.name == state


def test_a_bucket_that_was_given_back_has_no_memory() -> None:
    made = gradient()
    made.bucket.discard()
    with pytest.raises(AssertionError, match="the bucket of unit a unit was given back"):
        made.bucket.parts(0)
