"""Names in a profile: what was under way for which unit, while torch's profiler records."""

import contextlib

import torch

from retrograde.torch_internals import profiling

PREFIX = "retrograde: "  # of every range of ours
_NOTHING = contextlib.nullcontext()


def labelled(what: str, name: str) -> contextlib.AbstractContextManager[object]:
    """A range in the profile, `retrograde: page-in of blocks.0`; costs a question where nobody records."""
    if not profiling():
        return _NOTHING
    return torch.profiler.record_function(f"{PREFIX}{what} {name}")


def labelled_as(*parts: object) -> contextlib.AbstractContextManager[object]:
    """The same, with a label of these parts and nothing else."""
    return torch.profiler.record_function("".join(map(str, parts))) if profiling() else _NOTHING
