"""Labels in profiles: what was under way for which unit, while torch's profiler records."""

import contextlib

import torch

from retrograde.torch_internals import profiling

PREFIX = "retrograde: "  # begins the name of every range of retrograde
_NOTHING = contextlib.nullcontext()


def labelled(what: str, name: str) -> contextlib.AbstractContextManager[object]:
    """A range in the profile, `retrograde: page-in of blocks.0`. It costs one check if no profiler records."""
    if not profiling():
        return _NOTHING
    return torch.profiler.record_function(f"{PREFIX}{what} {name}")


def labelled_as(*parts: object) -> contextlib.AbstractContextManager[object]:
    """A range in the profile whose label is these parts, joined."""
    return torch.profiler.record_function("".join(map(str, parts))) if profiling() else _NOTHING
