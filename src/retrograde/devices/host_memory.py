"""Large tensors in the host's memory, each in a mapping of its own, with huge pages where the system has them.

Pages, buckets and sums of gradients come and go with every step. Those of some MiB are malloc's: they find the memory
that activations had, which needs no page faults. Larger ones leave holes that malloc seldom fills, and keeps: with
glibc the peak of a rank grew by a half with sums of 16 MiB. A mapping is gone when its tensor is.
"""

import errno
import mmap
import sys

import torch

LARGE = 2**24  # bytes; a mapping is rounded up to huge pages, which must not matter
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # not every system has them


def host_empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the host, not initialized."""
    nbytes = numel * dtype.itemsize
    if nbytes < LARGE or sys.platform == "win32":
        return torch.empty(numel, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE_PAGES is not None:
        _advise(memory, _HUGE_PAGES)
    return torch.frombuffer(memory, dtype=dtype)


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:  # that is what a kernel says which was built without them
            raise
