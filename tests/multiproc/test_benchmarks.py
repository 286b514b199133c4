"""The benchmark harness from its command line, on a very small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.crew import Crew, CrewError
from benchmarks.model import TINY
from benchmarks.protocol import Turn

ROOT = Path(__file__).parents[2]
LIMIT = 250.0  # seconds: some processes that import torch, which takes long on a busy machine
pytestmark = pytest.mark.timeout(LIMIT + 30)


def run(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs it in a session of its own, so that what it leaves behind can be found, and ended.

    Not by tests/processes.py: the benchmarks start their ranks themselves, and the tests are about that."""
    command = [sys.executable, "-m", module, "--tiny", *options]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        pytest.fail(f"no end after {LIMIT:g} s\n{said}")
    assert _ends_soon(process.pid), f"processes were left behind\n{said}"
    return subprocess.CompletedProcess(command, process.returncode, said)


def _ends_soon(group: int) -> bool:
    """multiprocessing's resource tracker outlives its parent by a moment; nobody else may."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    os.killpg(group, 9)
    return False


def test_contenders_are_timed_and_written_down(tmp_path: Path) -> None:
    done = run("benchmarks.run", "--contenders", "retrograde-3,ddp", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout
    (stored,) = tmp_path.glob("tiny-*.json")
    found = json.loads(stored.read_text())
    assert list(found["contenders"]) == ["alone", "retrograde-3", "ddp"]
    assert found["contenders"]["alone"]["calls_per_step"] == {}
    assert found["contenders"]["ddp"]["calls_per_step"] == {"all-reduce": 1}
    assert found["contenders"]["retrograde-3"]["exchanges_per_step"]["reduce"] == 3  # two blocks and the root
    assert stored.with_suffix(".md").read_text().startswith("**Per step and rank")
    assert not list(tmp_path.glob("latest*"))  # a smoke test is no result


def test_the_cost_of_hooks_is_measured(tmp_path: Path) -> None:
    done = run("benchmarks.hooks_cost", "--repeats", "3", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "tiny-hooks.json").read_text())
    assert found["saved"]["weights"] > 0
    assert "retrograde, stage 3" in found["over_plain"]


def test_the_cost_per_parameter_is_measured(tmp_path: Path) -> None:
    done = run("benchmarks.overhead", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "tiny-overhead.json").read_text())["costs"]
    assert {cost["engine"] for cost in found} == {"plain", "fsdp2", "retrograde-3"}
    assert len(found) == 3 * (2 * 7 + 1)  # seven operations on two numbers of parameters, and the whole step
    assert all(len(cost["seconds"]) == 2 and min(cost["seconds"]) > 0 for cost in found)
    assert (tmp_path / "tiny-overhead.md").read_text().startswith("**CPU time per parameter and call")
    assert not list(tmp_path.glob("latest*"))


def test_windows_are_measured(tmp_path: Path) -> None:
    done = run("benchmarks.window", "--engines", "retrograde-2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "tiny-window.json").read_text())["cases"]
    reductions = {(case["manner"], case["backwards"]): case["exchanges"]["reduce"] for case in found}
    assert {reductions["each", n] for n in (2, 4, 8)} == {4, 8, 16}  # of two units
    assert {reductions[manner, n] for manner in ("coalesced", "no_sync") for n in (2, 4, 8)} == {2}
    assert [reductions["coalesced, budget of half", n] for n in (2, 4, 8)] == [3, 5, 9]
    assert (tmp_path / "tiny-window.md").read_text().startswith("**retrograde-2**")
    assert not list(tmp_path.glob("latest*"))


def test_a_rank_that_dies_is_named_and_takes_its_crew_along(tmp_path: Path) -> None:
    with Crew("alone", TINY, world=2, logs=tmp_path, limit=60.0) as crew:
        assert len(crew.ask(Turn(steps=1, settle=0))) == 2
        victim, other = crew._processes
        victim.kill()
        victim.join()
        with pytest.raises(CrewError, match=r"alone, rank 0: (died while idle|process ended)"):
            crew.ask(Turn(steps=1, settle=0))
    assert not other.is_alive()


def test_what_is_for_accelerators_runs_on_the_test_device(tmp_path: Path) -> None:
    """All sections: `python -m benchmarks.gpu --tiny --device late`, in `make test-all`."""
    into = tmp_path / "report.md"
    done = run("benchmarks.gpu", "--device", "late", "--into", str(into), "--sections", "matrix", "overlap", "training")
    said = into.read_text()
    assert done.returncode == 0, said
    assert [line[3:] for line in said.splitlines() if line.startswith("## ")] == ["matrix", "overlap", "training"]
    assert "sums in rank order: 2 of 2 rows and stages are right" in said
    assert "sums by the backend: 2 of 2 rows and stages are right" in said
    assert "and without overlap: True" in said
    losses = [line.split("|")[4].strip() for line in said.splitlines() if line.startswith("| retrograde-")]
    assert len(losses) == 2
    assert losses[0] == losses[1]


def test_no_accelerator_is_said_in_a_line() -> None:
    done = run("benchmarks.gpu")
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert "no accelerator here" in done.stdout
