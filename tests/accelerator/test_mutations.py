"""Waits and events of the engine that are left out show on the device. All of them: tests/accelerator/mutations.py."""

from __future__ import annotations

import pytest

from tests.accelerator.mutations import NOT_SHOWN, UNVISITED, WORLD, Site, play, sites_in, sites_in_sources
from tests.harness import Ranks

# One of each file and kind, with the scene that shows it.
PART = (
    ("wait", "page.py", "fetching.wait(free)", "two streams"),
    ("call", "page.py", "self._work.wait(current)", "collective"),
    ("wait", "bucket.py", "stream.wait(self._free)", "collective"),
    ("call", "collective_sum.py", "reducing.work.wait(stream)", "collective, backend's order"),
    (
        "wait",
        "strategy.py",
        "self._streams.current().wait(self._streams.reducing.record())",
        "gradients changed, one-sided",
    ),
    ("wait", "landing.py", "home.wait(streams.reducing.record())", "given up, one-sided"),
    ("wait", "fences.py", "serving.wait(self._written)", "one-sided"),
    ("to_host", "staged.py", "return found if isinstance(found, str)", "one-sided"),
    ("wait", "pool.py", "self._homes.pop(", "window"),
    ("record", "collective_sum.py", "self._pool.give(brought", "offload, given up on another way"),
    ("wait", "collective_sum.py", "stream.wait(free)", "offload, work before a step"),
    ("wait", "source.py", "fetching.wait(", "offload, evaluated and edited"),
    ("wait", "streams.py", "self.returning.wait(event)", "offload, evaluated and edited"),
    ("call", "gathering.py", "work.wait(current)", "edits of what is held"),
    ("call", "meetings.py", "self._ordered.gather_tensors(", "norms"),
    ("hold", "ties.py", "current.hold(part)", "pipeline, a tie with gradients on one rank"),
)


@pytest.mark.parametrize(("kind", "file", "begins", "scene"), PART, ids=[f"{part[1]}-{part[0]}" for part in PART])
def test_a_site_that_is_left_out_shows(late_ranks: Ranks, kind: str, file: str, begins: str, scene: str) -> None:
    found = [site for site in sites_in(scene, late_ranks(WORLD)) if site[:2] == (kind, file)]
    (site,) = [site for site in found if site.code.startswith(begins)]
    assert any(outcome.shown for outcome in late_ranks(WORLD).run(play, scene, site, timeout=120.0))


def test_what_is_excused_is_there() -> None:
    known = {(site.file, site.code) for site in sites_in_sources()}
    assert set(UNVISITED) | set(NOT_SHOWN) <= known
    assert not set(UNVISITED) & set(NOT_SHOWN)


def test_sites_are_found_in_sources() -> None:
    assert Site("wait", "page.py", "fetching.wait(free)") in sites_in_sources()
