"""The benchmark beside torch.distributed.pipelining, small: what it measures, of engines that train the same."""

from pathlib import Path

import pytest

from benchmarks.bubble import Measured
from benchmarks.model import Workload
from benchmarks.pipeline import Figures, Results, below, markdown
from benchmarks.pipeline_rank import Case, Engine, RankOfEngine, Seen, Timed, Work
from tests.harness import Ranks

LEAST = Case("zb-v", "fp32", True, pending="0")
CASES = (Case("zb-h1", "bf16", False), Case("zb-v", "fp32", True), LEAST)
MODEL = Workload(layers=4, width=16, heads=2, vocab=16, context=4, batch=4)


def measured(rank: int, world: int) -> dict[Case, dict[Engine, tuple[Seen, Timed]]]:
    found: dict[Case, dict[Engine, tuple[Seen, Timed]]] = {}
    for engine in Engine:
        one = RankOfEngine(engine, rank, world)
        for case in CASES:
            one.build(Work(case, MODEL))
            found.setdefault(case, {})[engine] = (one.look(), one.time())
    return found


@pytest.mark.filterwarnings("ignore")  # torch's schedules use what torch deprecates
def test_both_engines_train_the_same_and_ours_needs_less(ranks: Ranks) -> None:
    peaks = []
    for by_case in ranks(2).run(measured):
        for case, pair in by_case.items():
            (seen, timed), (other, theirs) = pair[Engine.OURS], pair[Engine.TORCH]
            assert timed.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-2), case  # bf16
            assert 0 < seen.peak < other.peak, case
            assert seen.after == 0, case
        peaks.append({case: pair[Engine.OURS][0].peak for case, pair in by_case.items()})
    most = {case: max(by_case[case] for by_case in peaks) for case in CASES}
    assert most[LEAST] < most[Case("zb-v", "fp32", True)]


def some(peak: list[int], seconds: list[float]) -> Figures:
    return Figures(peak, [0, 0], [2**20] * 2, seconds, [1.0, 1.0], [0.0] * len(seconds))


def test_results_are_kept_and_added_to(tmp_path: Path) -> None:
    case = Case("zb-h1", "fp32", False)
    pair = {Engine.OURS: some([2**20, 3 * 2**20], [1.0, 2.0]), Engine.TORCH: some([4 * 2**20, 2**20], [2.0, 2.0])}
    bubble = Measured("zb-v", "torch", [0.1, 0.2], [0.3, 0.4], (0.0, 0.125))
    stored = tmp_path / "results.json"
    stored.write_text(Results("a setting", {case: pair}, [bubble]).as_json())
    read = Results.read(stored)
    assert read.cases == {case: pair} and read.setting == "a setting"
    assert below(pair) == 0.25
    table = markdown(read)
    assert "| zb-h1 | fp32 | no | **4** (4 1) | **3** (1 3) | 25% (reached) |" in table
    assert "| zb-h1 | fp32 | no | 2.00 | 1.50 | 0.75 (0.50 to 1.00) |" in table
    assert "| zb-v | torch | 15.0% (10.0% to 20.0%) | 35.0% (30.0% to 40.0%) | 0.0%, 12.5% |" in table
    assert Results.read(tmp_path / "none.json").cases == {}
