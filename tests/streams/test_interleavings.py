"""Every interleaving of small cases on the simulated device, and each wait and event left out in turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import retrograde
from retrograde.devices.simulated import Corrupted, SimulatedDevice, Site, explore, replay, sample
from tests.streams.programs import Check, kept, kept_in_place, pages_of_two_streams, producers

Program = Callable[[SimulatedDevice], Check]
CASES: dict[str, Program] = {
    "1 producer, 2 buckets": producers(1, 2, 0),
    "2 producers, 2 buckets": producers(2, 2, 0),
    "3 producers, 2 buckets": producers(3, 2, 0),
    "3 producers, 2 buckets, all copied": producers(3, 2, 0, keeping=False),
    "2 producers, 2 buckets, the other rank is late": producers(2, 2, 0, late=True),
    "3 prefetched pages": producers(1, 0, 3),
    "3 producers, 2 buckets, 3 prefetched pages": producers(3, 2, 3),
    "a bucket that waits and one that is forgotten": kept,
    "a gradient that waits in its place": kept_in_place,
    "pages of two streams": pages_of_two_streams,
}
SOURCES = {path.name for room in ("gradients", "pages") for path in Path(retrograde.__path__[0], room).glob("*.py")}


def sites(program: Program) -> set[Site]:
    """The engine's own lines that wait or record in a program."""
    device = SimulatedDevice()
    program(device)
    return {site for site in device.sites if site.file in SOURCES}


@pytest.mark.parametrize("name", CASES)
def test_every_interleaving_is_right(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = explore(CASES[name])
    with capsys.disabled():
        print(f"\n{name}: {found.interleavings:,} interleavings in {found.states:,} states")
    assert found.interleavings > 1


def test_every_wait_and_event_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    """A line is needed if some program goes wrong without it."""
    everywhere = {site for program in CASES.values() for site in sites(program)}
    assert len(everywhere) > 10
    for site in sorted(everywhere):
        corrupted = _first_corruption(site)
        assert corrupted is not None, f"nothing goes wrong without {site}"
        with capsys.disabled():
            print(f"\nwithout {site}: after {corrupted.tried} orders {corrupted.faults[0]}")


def test_every_producer_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the three, in both buckets, the one whose gradient is kept in its place (the third) as well."""
    passing, copying = CASES["3 producers, 2 buckets"], CASES["3 producers, 2 buckets, all copied"]
    device = SimulatedDevice()
    passing(device)
    closing = [site for site, times in device.sites.items() if site.file == "bucket.py" and times == 6]
    assert {site.kind for site in closing} == {"wait", "record"}
    needed = []
    for site in sorted(closing):
        for time in range(1, 7):
            if _corrupts(passing, site._replace(time=time)) or _corrupts(copying, site._replace(time=time)):
                needed.append(site._replace(time=time))
    with capsys.disabled():
        print(f"\n{len(needed)} single waits and events of producers are needed")
    kinds = [site.kind for site in needed]
    # All events, all waits of the reductions, and all waits for free storage but for those after a first one.
    assert kinds.count("record") == 6 and kinds.count("wait") >= 6 + 4


def _corrupts(program: Program, site: Site) -> bool:
    try:
        explore(program, without=site)
    except Corrupted:
        return True
    return False


def _first_corruption(site: Site) -> Corrupted | None:
    for program in CASES.values():
        if site in sites(program):
            try:
                explore(program, without=site)
            except Corrupted as error:
                assert replay(program, error.interleaving, without=site) == error.faults
                return error
    return None


def test_large_cases_by_chance() -> None:
    """Replay one with `sample(producers(3, 6, 6), range(seed, seed + 1))`."""
    assert sample(producers(3, 6, 6), range(200)) == 200, "no order was tried twice"


def test_a_seed_is_named_and_replayed() -> None:
    program = producers(3, 6, 6)
    site = next(s for s in sorted(sites(program)) if s.file == "bucket.py" and s.kind == "wait")
    with pytest.raises(Corrupted, match=r"^seed \d+: ") as caught:
        sample(program, range(200), without=site)
    seed = int(str(caught.value).split(":")[0].split()[1])
    with pytest.raises(Corrupted) as again:
        sample(program, range(seed, seed + 1), without=site)
    assert again.value.faults == caught.value.faults
