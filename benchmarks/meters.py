"""What a rank can read about itself: memory, CPU time, bytes sent, collectives issued.

Nothing here asks the engine under test, but for one thing. Bytes come from the kernel's TCP counters and collectives
from the profiler, which also sees those issued from C++ (DDP's reducer) and from other threads. The kernel does not
count what goes through a socket within a host: there retrograde's connections are asked (tests/transport/test_counts.py
compares their count with the kernel's, over TCP).
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

_BYTES_SENT = struct.Struct("200xQQ")  # tcpi_bytes_sent and tcpi_bytes_retrans of struct tcp_info (linux/tcp.h, 4.19)
_KINDS = {
    "allgather": "all-gather",
    "allreduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv": "receive",
}
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def memory_bytes(field: str) -> int:
    """A field of /proc/self/status: VmRSS is what is resident now, VmHWM the most there ever was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise KeyError("MemAvailable")


def return_free_memory() -> None:
    """Give freed heap back to the system, or a dozen idle contenders would hold their peaks."""
    ctypes.CDLL(None).malloc_trim(0)


def machine_busy_seconds() -> float:
    """CPU seconds spent by everything on this machine since boot, stolen time included."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / _CLOCK_TICKS


def bytes_sent() -> int:
    """Payload bytes this process has sent over the TCP sockets it now holds, and over retrograde's within the host."""
    ours = sys.modules.get("retrograde.transport.connections")  # its peers have not imported it
    wires = [each.wires for each in ours.Connections._by_group.values() if each.wires is not None] if ours else []
    total = sum(each.sent for each in wires if not each.spans_hosts)
    for connection in tcp_connections():
        with connection:
            total += sent_on(connection)
    return total


def tcp_connections() -> Iterator[socket.socket]:
    """The TCP sockets that this process holds and that are connected, each by a descriptor of its own. Close it before
    the next is asked for."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(entry)))
        except OSError:  # the listing's own descriptor is gone by now
            continue
        if connection.type == socket.SOCK_STREAM and connection.family in _INTERNET and _is_connected(connection):
            yield connection
        else:
            connection.close()


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def sent_on(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT.size)
    sent, again = _BYTES_SENT.unpack(info.ljust(_BYTES_SENT.size, b"\0"))
    return sent - again


def collectives_during(run: Callable[[], object]) -> dict[str, int]:
    """How many collectives of each kind `run` issues on this rank, from whatever thread or language."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as recorded:
        run()
    issued = [event.name for event in recorded.events() if event.name.startswith("c10d::")]
    return dict(sorted(Counter(_kind(name) for name in issued).items()))


def _kind(operator: str) -> str:
    """One name for an operator and its variants: c10d::_allgather_base_ is an all-gather."""
    return next((kind for part, kind in _KINDS.items() if part in operator), operator)
