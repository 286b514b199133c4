"""The arithmetic behind the benchmark's tables."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.contenders import CONTENDERS, FIELDS
from benchmarks.model import FULL, TINY, Batches, build
from benchmarks.protocol import Counted, Ready, TurnTaken
from benchmarks.report import Results, as_json, markdown, notes
from benchmarks.run import arguments
from benchmarks.stats import Ceiling, Record, Spread, bars, ceilings, check_losses

MIB = 2**20


def taken(seconds: list[float], loss: float = 2.0, peak: int = 500 * MIB, sent: float = 8.0) -> TurnTaken:
    return TurnTaken(
        seconds=tuple(seconds),
        losses=(loss,) * len(seconds),
        sent_bytes_per_step=sent,
        cpu_seconds=1.0,
        idle_cpu_seconds=0.0,
        idle_seconds=1.0,
        peak_rss=peak,
    )


def turn(seconds: float, loss: float = 2.0, peak: int = 500 * MIB) -> list[TurnTaken]:
    """Of two ranks, one step."""
    return [taken([seconds], loss, peak), taken([seconds / 2], loss, peak)]


def record(name: str, seconds: list[float], loss: float = 2.0, peak: int = 500 * MIB) -> Record:
    """Two ranks, one step of the given length in each repeat."""
    ready = [Ready(parameters=10, base_rss=200 * MIB, setup_peak=300 * MIB)] * 2
    turns = [turn(each, loss, peak) for each in seconds]
    return Record(name, ready, turns, [Counted({"all-gather": 3}, {})] * 2)


def beside(limit: Record, name: str, seconds: list[float]) -> Record:
    """The same, each just after a turn of the limit."""
    found = record(name, [])
    for number, each in enumerate(seconds):
        found.follow(replace(limit, turns=limit.turns[: number + 1]), turn(each))
    return found


def results(*records: Record) -> Results:
    found = Results("2026-01-01", {"cpu": "a CPU", "cores": 2}, {"torch": "2"}, TINY, world=2, steps=1)
    found.records = {each.name: each for each in records}
    return found


def test_a_step_ends_with_its_slowest_rank() -> None:
    slow_then_fast, fast_then_slow = taken([1.0, 5.0, 2.0]), taken([3.0, 1.0, 2.5])
    both = Record("x", [], [[slow_then_fast, fast_then_slow]])
    assert both.turn_seconds() == [3.0]  # the median of 3, 5 and 2.5


def test_a_ratio_pairs_turns_of_the_same_repeat() -> None:
    # The machine was half as fast in the second repeat: both contenders felt it, the ratio does not.
    assert record("a", [3.0, 6.0]).over(record("b", [2.0, 4.0])) == Spread(1.5, 1.5, 1.5)


def test_a_ratio_to_the_limit_is_to_its_turn_just_before() -> None:
    limit = record("alone", [1.0])
    ours, peer = record("retrograde-3", []), record("ddp", [])
    ours.follow(limit, turn(1.1))
    limit.turns.append(turn(2.0))  # the machine is half as fast now
    peer.follow(limit, turn(2.4))
    assert (ours.over_limit, peer.over_limit) == ([1.1], [1.2])


@pytest.mark.parametrize(("number", "outside"), [(1, 0), (5, 0), (8, 0), (9, 1), (11, 1), (12, 2), (21, 5)])
def test_the_interval_of_a_median(number: int, outside: int) -> None:
    """As tables of the sign test have it."""
    found = Spread.of_median([float(each) for each in reversed(range(number))])
    assert found == Spread((number - 1) / 2, outside, number - 1 - outside)


@pytest.mark.parametrize(
    ("low", "high", "met"),
    [(1.03, 1.05, True), (1.0, 1.06, True), (1.04, 1.07, True), (1.03, 1.08, False), (1.07, 1.08, False)],
)
def test_a_ceiling_within_a_wide_interval_is_not_kept(low: float, high: float, met: bool) -> None:
    assert Ceiling("an engine", 1.06, Spread((low + high) / 2, low, high)).met == met


def test_ceilings_are_of_what_ran() -> None:
    limit = record("alone", [1.0, 2.0])
    (found,) = ceilings({"alone": limit, "retrograde-3": beside(limit, "retrograde-3", [1.1, 2.4])})
    assert (found.name, found.ceiling, found.met) == ("retrograde-3", 1.10, False)
    assert ceilings({"alone": limit, "retrograde-3": record("retrograde-3", [1.1])}) == []


def test_memory_is_told_with_and_without_the_base() -> None:
    one = record("a", [1.0], peak=500 * MIB)
    assert one.peak_rss() == 500 * MIB
    assert one.own_peak() == 300 * MIB


def test_bars_appear_only_for_what_ran() -> None:
    ours = record("retrograde-3", [1.0], peak=400 * MIB)
    peer = record("fsdp2-reshard", [2.0], peak=300 * MIB)
    found = {bar.claim: bar.met for bar in bars({each.name: each for each in (ours, peer)})}
    assert found == {
        "retrograde-3 is faster than fsdp2-reshard": True,
        "retrograde-3 peaks below fsdp2-reshard": False,
    }


@pytest.mark.parametrize("loss", [2.1, float("nan")])
def test_a_contender_that_trains_something_else_is_named(loss: float) -> None:
    found = results(record("alone", [1.0], loss=9.0), record("ddp", [1.0]), record("fsdp2", [1.0], loss=loss))
    check = check_losses(found.records)
    assert check is not None
    assert check.wrong() == ["fsdp2"]
    assert "WRONG LOSS: fsdp2 did not train what the others trained." in notes(found)


def test_a_busy_machine_is_mentioned() -> None:
    found = results(record("alone", [1.0]))
    found.other_load = [0.0, 0.3, 0.4]
    assert any("do not trust" in note for note in notes(found))
    found.other_load = [0.0, 0.01, 0.4]
    assert not any("do not trust" in note for note in notes(found))


def test_results_are_written_as_a_table_and_as_json() -> None:
    limit = record("alone", [2.0])
    found = results(limit, beside(limit, "retrograde-3", [3.0]), beside(limit, "deepspeed-3", [6.0]))
    found.absent = {"deepspeed-1": "not installed", "deepspeed-2": "not installed"}
    text = markdown(found)
    assert "| retrograde-3 | 3000 | 1.50 (1.50 to 1.50) | 3 all-gather | 0.0 | 500 | 300 |" in text
    assert "| deepspeed-3 | 2.00 (2.00 to 2.00) |" in text
    assert "- Not run: deepspeed-1, deepspeed-2: not installed." in text
    stored = json.loads(as_json(found))
    assert stored["contenders"]["deepspeed-3"]["over_alone"]["median"] == 3.0


def test_the_model_has_the_size_it_is_named_for() -> None:
    assert round(sum(p.numel() for p in build(FULL).parameters()) / 1e6, 1) == 33.7


def test_data_is_the_same_for_every_contender_and_other_for_every_rank() -> None:
    first, again, other = (Batches(TINY, rank).take()[0] for rank in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)


def test_the_limit_always_runs_first() -> None:
    assert arguments(["--contenders", "fsdp2,ddp"]).names == ["alone", "ddp", "fsdp2"]
    assert arguments(["--field", "bf16", "--contenders", "fsdp2-bf16"]).names == ["alone-bf16", "fsdp2-bf16"]
    assert all(arguments(["--field", field]).names[0].startswith("alone") for field in FIELDS)
    assert set(CONTENDERS) == {name for field in FIELDS for name in arguments(["--field", field]).names}


def test_an_unknown_contender_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--contenders", "zero"])
    assert "unknown contenders: zero" in capsys.readouterr().err
