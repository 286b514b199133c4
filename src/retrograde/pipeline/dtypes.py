"""The precision of a pipeline: to which dtypes a stage's arguments and results are cast.

A model that is cut into stages is cast around as a whole one is (parameters/casting.py): what the caller gives becomes
`param`, on whichever stage it arrives, and what the last stage returns becomes `output`. Between stages tensors travel
as blocks have made them.
"""

from typing import NamedTuple

import torch

from retrograde.layout import Precision


class StageCasts(NamedTuple):
    """The casts of one stage. None leaves tensors as they are."""

    arguments: torch.dtype | None = None  # for positional arguments, which the caller gives to the first stage
    options: torch.dtype | None = None  # for keyword arguments, which the caller gives to all stages
    results: torch.dtype | None = None

    @staticmethod
    def of(stage: int, last: int, precision: Precision) -> "StageCasts":
        given = precision.page if precision.inputs else None
        return StageCasts(
            arguments=given if stage == 0 else None,
            options=given,
            results=precision.result if stage == last else None,
        )


AS_THEY_COME = StageCasts()
