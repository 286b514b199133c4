"""What a stage holds after F, I and W, as arithmetic over its shapes, and beside torch's own split backward."""

import pytest

from benchmarks.stage_memory import CASES, measure, ours, theirs
from tests.pipeline.bytes_of_blocks import BLOCKS, PAIRS, RECEIVED, TOKEN_WISE, saved


@pytest.mark.parametrize("name", CASES)
def test_live_bytes_are_what_the_shapes_say(name: str) -> None:
    kind, recompute = CASES[name]
    figures = measure(ours, kind, recompute)
    assert figures.after_f == saved(kind, recompute)
    assert figures.after_i == BLOCKS * PAIRS - RECEIVED
    assert figures.unread == 0
    assert figures.after_w == 0
    assert figures.runs == [1 if recompute is None else 2] * BLOCKS


@pytest.mark.parametrize("name", CASES)
def test_against_torch(name: str) -> None:
    kind, recompute = CASES[name]
    mine, torchs = measure(ours, kind, recompute), measure(theirs, kind, recompute)
    assert torchs.after_f == mine.after_f  # both measure the same stage
    assert torchs.unread > 0 and torchs.after_w == TOKEN_WISE  # else there is nothing to compare with
    if recompute is None:
        assert mine.after_i <= 0.70 * torchs.after_i
    else:
        assert mine.peak <= 0.35 * torchs.peak


def test_reentrant_recompute_holds_no_more() -> None:
    figures = measure(ours, "plain", "reentrant")
    assert figures.after_i == BLOCKS * PAIRS - RECEIVED
    assert figures.runs == [2] * BLOCKS
