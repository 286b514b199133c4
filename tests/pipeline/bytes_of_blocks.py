"""Bytes that the blocks of a stage hold, derived from their shapes."""

from benchmarks.stage_blocks import BATCH, HEADS, TOKENS, WIDTH

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
