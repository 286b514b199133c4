"""Names in a profile: what was under way for which unit, while torch's profiler records."""

import contextlib

import torch

from retrograde.torch_internals import profiling

_NOTHING = contextlib.nullcontext()


def labelled(what: str, name: str) -> contextlib.AbstractContextManager[object]:
    """A range in the profile, `retrograde: page-in of blocks.0`; costs a question where nobody records."""
    if not profiling():
        return _NOTHING
    return torch.profiler.record_function(f"retrograde: {what} {name}")


def labelled_as(label: str) -> contextlib.AbstractContextManager[object]:
    """The same, for a label that was made before."""
    return torch.profiler.record_function(label) if profiling() else _NOTHING
