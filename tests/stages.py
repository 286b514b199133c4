"""The stages and worlds that tests run with. A test that takes fewer says why by the name of what it takes."""

from __future__ import annotations

import pytest

STAGES = (1, 2, 3)
WORLDS = (1, 2, 4)

EACH_STAGE = pytest.mark.parametrize("stage", STAGES)
EACH_WORLD = pytest.mark.parametrize("world", WORLDS)

# Pages live at stage 1 as they do at stage 2: what is about pages runs with one stage that keeps them and the one that
# drops them.
PAGE_STAGES = pytest.mark.parametrize("stage", (2, 3))
# Stage 1 adds up locally and talks to nobody in a backward: what is about the reduction of one backward runs with those
# that have one.
REDUCING_STAGES = pytest.mark.parametrize("stage", (2, 3))
# They differ in everything that a stage is, and stage 2 has one half of each.
OPPOSITE_STAGES = pytest.mark.parametrize("stage", (1, 3))
# Gradients are reduced at stage 3 as they are at stage 2.
GRADIENT_STAGES = pytest.mark.parametrize("stage", (1, 2))
# Parameters stay whole on every rank between their uses.
WHOLE_STAGES = pytest.mark.parametrize("stage", (1, 2))

# Alone and with somebody: what is about the same code at world 1.
ALONE_OR_NOT = pytest.mark.parametrize("world", (1, 2))
# With one other rank and with several: what is about the others.
WITH_OTHERS = pytest.mark.parametrize("world", (2, 4))
# Every stage with one other rank, and the one that reads and reduces most with several: for what takes long.
STAGES_WITH_OTHERS = pytest.mark.parametrize(("world", "stage"), ((2, 1), (2, 2), (2, 3), (4, 3)))
