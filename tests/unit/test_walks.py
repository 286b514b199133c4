"""docs/design/walks.md says what a run does: the same hops, in the same order."""

import re

import pytest

from tests.unit.marks import between_marks
from tools.walks import OUTSIDE, Hop, Place, Walks, walks

PAGE = "design/walks.md"
PLACE = rf"{OUTSIDE}|`[^`]+` `[^`]+`"
HOP = re.compile(rf"^\d+\. ({PLACE}) → ({PLACE})\.$", re.MULTILINE)


def written(name: str) -> list[str]:
    """The hops of one walk, as the page has them."""
    return [f"{caller} → {called}" for caller, called in HOP.findall(between_marks(PAGE, name))]


@pytest.fixture(scope="module")
def traced() -> Walks:
    return walks()


@pytest.mark.parametrize("name", Walks._fields)
def test_the_page_has_the_hops_of_a_run(traced: Walks, name: str) -> None:
    hops: list[Hop] = getattr(traced, name)
    assert written(name) == [str(hop) for hop in hops]


@pytest.mark.parametrize("name", Walks._fields)
def test_every_hop_has_a_sentence(name: str) -> None:
    items = re.split(r"^\d+\. ", between_marks(PAGE, name), flags=re.MULTILINE)[1:]
    assert len(items) == len(written(name))
    assert all(len(item.strip().splitlines()) > 1 for item in items)


def test_a_weight_reaches_the_pager_in_three_hops(traced: Walks) -> None:
    assert traced.weight[2].called == Place("pages/pager.py", "Pager.full")


def test_hops_are_between_rooms(traced: Walks) -> None:
    for hop in (*traced.weight, *traced.gradient):
        assert hop.caller.room != hop.called.room
