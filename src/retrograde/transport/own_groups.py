"""Process groups of our own, in which nobody else's calls come between ours; used again when they are free.

[Note: groups of our own]
A group cannot end with the engine that it was made for. torch wants all ranks to destroy it at the same place, and they
let go of an engine at different times, or one of them never does. Nor can two engines have one group: ranks may use
them in different orders. But what one engine has left another may take.

Rule 1  A rank puts a group back when nothing of its user is left and every call on it has been waited for. A group with
        calls under way is lost: it ends with the process.
Rule 2  Whoever needs a group hears, at a meeting, what each rank has put back, and after how many calls. One that all
        its ranks have put back after as many is taken by all of them. Otherwise all make a new one.
Rule 3  torch owns the group. What went with `destroy_process_group()` is not offered.
Rule 4  torch shuts it together with all others, and mostly before the user's. Other ranks may still need calls on it,
        so connections are left before that (leaving.py).
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

TellAll = Callable[[list[str]], Sequence[Sequence[str]]]  # from what this rank says to what all ranks of a meeting say


class Calls:
    """Counts this rank's calls on one group, and knows which are under way."""

    def __init__(self) -> None:
        self.started = 0
        self._under_way: set[int] = set()

    def begin(self) -> int:
        """Note a call that begins. Returns its number."""
        self.started += 1
        self._under_way.add(self.started)
        return self.started

    def end(self, number: int) -> None:
        """Note that somebody has waited for a call, perhaps not as the first."""
        self._under_way.discard(number)

    @property
    def over(self) -> bool:
        return not self._under_way


class _Kind(NamedTuple):
    members: tuple[int, ...]  # ranks of the default group, in the order that they have in this one
    backend: str
    timeout: float


class _Free(NamedTuple):
    group: "weakref.ref[dist.ProcessGroup]"  # Rule 3
    calls: Calls


_made: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
_free: dict[_Kind, dict[str, _Free]] = {}  # by name and number of calls
_lock = threading.RLock()  # memory may be collected in any thread, also in one that is here


class OwnGroup:
    """A group in use, until nobody refers to this object."""

    def __init__(self, kind: _Kind, group: dist.ProcessGroup, calls: Calls) -> None:
        self.group = group
        self.calls = calls
        weakref.finalize(self, _put_back, kind, group, calls).atexit = False


def own_group(
    rows: Sequence[Sequence[int]], rank: int, users: dist.ProcessGroup | None, timeout: float, tell_all: TellAll
) -> OwnGroup:
    """The group of this rank's row, one that was put back or a new one. All ranks of the meeting come here.

    `rows`: who needs a group together, as ranks of the meeting, where this one is `rank`. `users`: the user's group,
    whose ranks meet and whose backends it has. `tell_all`: the meeting."""
    ranks, backend = dist.get_process_group_ranks(users), dist.get_backend(users)
    kinds = [_Kind(tuple(ranks[each] for each in row), backend, timeout) for row in rows]
    (place,) = (number for number, row in enumerate(rows) if rank in row)
    told = tell_all(_offered(kinds[place]))
    chosen = [_common([told[each] for each in row]) for row in rows]
    mine = chosen[place]
    if mine is not None and None not in chosen:
        return _take(kinds[place], mine)
    made = [new_group(kind.members, backend, timeout, len(ranks)) for kind in kinds]  # all rows', in one order
    group = made[place]
    assert group is not None  # this rank is in it
    return OwnGroup(kinds[place], group, Calls())


def new_group(members: Sequence[int], backend: str, timeout: float, together: int) -> dist.ProcessGroup | None:
    """Make a new group; None where this rank is not among its members. `together`: how many ranks come here.

    `backend`: that of the user's group; torch would take the default group's."""
    # Without the ranks outside of the group torch names a new one by how many groups each rank is in, so it is only
    # done where there are such ranks.
    apart = together < dist.get_world_size()
    inside = dist.get_rank() in members
    if apart and not inside:
        return None
    limit = timedelta(seconds=timeout)
    made = dist.new_group(list(members), limit, backend, use_local_synchronization=apart, sort_ranks=False)
    if not inside or not isinstance(made, dist.ProcessGroup):
        return None
    _made.add(made)
    return made


def is_own(group: dist.ProcessGroup) -> bool:
    return group in _made


def _put_back(kind: _Kind, group: dist.ProcessGroup, calls: Calls) -> None:
    if not calls.over:
        return  # Rule 1
    label = f"{group.group_name} after {calls.started} calls"
    with _lock:
        _free.setdefault(kind, {})[label] = _Free(weakref.ref(group), calls)


def _offered(kind: _Kind) -> list[str]:
    with _lock:
        free = _free.setdefault(kind, {})
        for label in [label for label, each in list(free.items()) if each.group() is None]:
            del free[label]
        return list(free)


def _common(told: Sequence[Sequence[str]]) -> str | None:
    """The first group that all of these ranks have put back after as many calls."""
    return next((label for label in told[0] if all(label in offered for offered in told)), None)


def _take(kind: _Kind, label: str) -> OwnGroup:
    with _lock:
        free = _free[kind].pop(label)
    group = free.group()
    assert group is not None, f"group {label} was destroyed while it was taken"
    return OwnGroup(kind, group, free.calls)
