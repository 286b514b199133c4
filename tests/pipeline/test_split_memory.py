"""What a stage holds after F, I and W, as arithmetic over its shapes, and beside torch's own split backward."""

import pytest

from benchmarks.stage_blocks import BATCH, HEADS, TOKENS, WIDTH
from benchmarks.stage_memory import CASES, measure, ours, theirs

BLOCKS = 2
ROWS = 4 * BATCH * TOKENS  # bytes of one float for every token
TOKEN_WISE = ROWS * WIDTH  # an activation as wide as the model

# What one block saves in forward. Its input is the output of the one before, or a receive buffer.
NORMS = 2 * (2 * ROWS + TOKEN_WISE)  # mean and deviation, output; twice
ATTENTION = 3 * TOKEN_WISE + TOKEN_WISE  # q, k, v; what goes into the output projection
PROBABILITIES = {"plain": 4 * BATCH * HEADS * TOKENS**2, "sdpa": 4 * BATCH * HEADS * TOKENS}  # sdpa: one sum per row
MIDDLE = TOKEN_WISE  # the sum after attention
MLP = 2 * 4 * TOKEN_WISE  # before and after the activation function
OUTPUT = TOKEN_WISE

# What W reads of one block: the input and the output's gradient of four linear layers.
PAIRS = (1 + 3) * TOKEN_WISE + (1 + 1) * TOKEN_WISE + (1 + 4) * TOKEN_WISE + (4 + 1) * TOKEN_WISE
RECEIVED = TOKEN_WISE  # the last layer's gradient is the receive buffer itself


def saved(kind: str, recompute: str | None) -> int:
    if recompute is not None:
        return BLOCKS * OUTPUT
    return BLOCKS * (NORMS + ATTENTION + PROBABILITIES[kind] + MIDDLE + MLP + OUTPUT)


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
