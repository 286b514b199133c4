"""The order in which streams run: no torch, but the scheduler itself with jobs that only note that they ran."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from tests.accelerator.laboratory import laboratory
from tests.accelerator.ranks import alone, each_case
from tests.harness import Ranks


def lazy_streams_run_when_asked_and_no_further() -> None:
    lab = laboratory("lazy")
    for name in ("a", "b"):
        lab.issue(0, name)
    mark = lab.record(0)
    lab.issue(0, "c")
    lab.issue(1, "d")
    assert lab.ran() == []
    lab.synchronize_mark(mark)
    assert lab.ran() == ["a", "b"]
    lab.synchronize(0)
    assert lab.ran() == ["a", "b", "c"]
    assert lab.synchronisations() == {"mark": 1, "stream": 1}


def a_wait_brings_what_it_waits_for() -> None:
    lab = laboratory("lazy")
    lab.issue(0, "a")
    mark = lab.record(0)
    lab.issue(0, "not needed")
    lab.issue(1, "b")
    lab.wait(1, mark)
    lab.issue(1, "c")
    lab.synchronize(1)
    assert lab.ran() == ["b", "a", "c"]


def eager_streams_run_at_once() -> None:
    lab = laboratory("eager")
    for stream, name in ((0, "a"), (1, "b"), (0, "c")):
        lab.issue(stream, name)
    assert lab.ran() == ["a", "b", "c"]


def sides_run_at_once_and_default_streams_late() -> None:
    lab = laboratory("sides")
    lab.issue(0, "default")
    lab.issue(1, "side")
    lab.wait(2, lab.record(0))
    lab.issue(2, "side that waits")
    assert lab.ran() == ["side"]
    lab.synchronize(2)
    assert lab.ran() == ["side", "default", "side that waits"]


def sides_run_between_the_steps_of_a_stream_that_is_waited_for() -> None:
    """This is the order in which a missing wait of the default stream shows."""
    lab = laboratory("sides")
    lab.issue(0, "producer")
    lab.wait(1, lab.record(0))
    lab.issue(1, "side")
    lab.issue(0, "consumer that forgot to wait")
    lab.synchronize(0)
    assert lab.ran() == ["producer", "side", "consumer that forgot to wait"]


def random_orders_are_those_of_their_seed() -> None:
    def order(seed: int) -> tuple[str, ...]:
        lab = laboratory("random", seed)
        for number, stream in itertools.product(range(4), range(3)):
            lab.issue(stream, f"{stream}.{number}")
        for stream in range(3):
            lab.synchronize(stream)
        for stream in range(3):
            ran = [name for name in lab.ran() if name.startswith(f"{stream}.")]
            assert ran == sorted(ran)
        return tuple(lab.ran())

    assert order(7) == order(7)
    assert len({order(seed) for seed in range(20)}) > 5


def polling_ends() -> None:
    lab = laboratory("lazy")
    lab.issue(0, "a")
    mark = lab.record(0)
    assert [lab.query(mark) for _ in range(3)] == [False, False, True]


def failures_surface_when_the_host_waits() -> None:
    lab = laboratory("eager")
    lab.fail(0, "the job")
    lab.issue(0, "next")
    try:
        lab.synchronize(0)
    except RuntimeError as error:
        assert "asynchronous failure of the job: broken" in str(error)
    else:
        raise AssertionError("nothing was raised")
    lab.synchronize(0)  # once
    assert lab.ran() == ["next"]


def a_blocked_host_lets_all_network_jobs_begin() -> None:
    """Otherwise two ranks could each wait for the job that the other has not begun."""
    lab = laboratory("lazy")
    lab.stop()  # the thread that does the same for an idle host, later
    lab.issue_network(1, "ours")
    lab.issue(2, "before theirs")
    lab.issue_network(2, "theirs")

    def peer() -> None:
        while "theirs" not in lab.begun():
            pass
        lab.answer("ours")

    thread = threading.Thread(target=peer)
    thread.start()
    lab.synchronize(1)
    thread.join()
    assert lab.ran() == ["before theirs", "ours"]


def an_idle_host_lets_network_jobs_run() -> None:
    """A host that waits elsewhere, for a message that a peer sends after a collective, asks for nothing here."""
    lab = laboratory("lazy")
    lab.issue(1, "before")
    lab.issue_network(1, "collective")
    lab.answer("collective")
    while "collective" not in lab.ran():
        pass


def calls_of_a_communicator_keep_their_order() -> None:
    lab = laboratory("sides")
    lab.issue_network(0, "first")
    lab.run_after(1, lab.record(0))
    lab.issue_network(1, "second")
    lab.answer("second")
    assert lab.ran() == []
    lab.answer("first")
    lab.synchronize(1)
    assert lab.ran() == ["first", "second"]


@each_case(
    lazy_streams_run_when_asked_and_no_further,
    a_wait_brings_what_it_waits_for,
    eager_streams_run_at_once,
    sides_run_at_once_and_default_streams_late,
    sides_run_between_the_steps_of_a_stream_that_is_waited_for,
    random_orders_are_those_of_their_seed,
    polling_ends,
    failures_surface_when_the_host_waits,
    a_blocked_host_lets_all_network_jobs_begin,
    an_idle_host_lets_network_jobs_run,
    calls_of_a_communicator_keep_their_order,
)
def test_order(late_ranks: Ranks, case: Any) -> None:
    late_ranks(1).run(alone, case)
