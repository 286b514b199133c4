"""Process groups: their store, their shutdown, and the tensors that their collectives take."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as collectives

from retrograde.torch_internals.probes import When, expect, find, probe, tiny

if TYPE_CHECKING:  # torch.distributed hides them from type checkers
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "PrefixStore",
    "Store",
    "TCPStore",
    "before_collectives",
    "before_group_shutdown",
    "store_of",
]

# ---- the store
store_of: Callable[[dist.ProcessGroup], Store] = find("torch.distributed.distributed_c10d:_get_process_group_store")
"""Where the ranks of a process group met, and can leave words for each other."""


# ---- its end
def before_group_shutdown(call: Callable[[dist.ProcessGroup], None]) -> None:
    """Have `call(group)` run before a process group is shut down, as `dist.destroy_process_group()` does."""
    shutdown = dist.ProcessGroup.shutdown

    def call_and_shut_down(group: dist.ProcessGroup) -> None:
        call(group)
        shutdown(group)

    dist.ProcessGroup.shutdown = call_and_shut_down  # type: ignore[method-assign, assignment]


@probe(
    "the life of a process group",
    "store_of",
    "before_group_shutdown",
    needed_for="connecting ranks, and leaving them when a process group is destroyed",
    otherwise="ranks cannot find each other; or a rank that has finished is missed by those that still read from it",
    when=When.DOCTOR,  # it makes a group of one rank
)
def _groups_tell_their_end() -> None:
    """Assumes: torch knows the store of a group, and `destroy_process_group()` calls `shutdown` of each group, which
    can be replaced on the class."""
    if dist.is_initialized():
        raise RuntimeError("there is a process group already: run this probe in a process of its own")
    shutdown = dist.ProcessGroup.shutdown
    seen: list[dist.ProcessGroup] = []
    before_group_shutdown(seen.append)
    try:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            group = collectives._get_default_group()
            store_of(group).set("a probe", "was here")
            expect(store_of(group).get("a probe"), b"was here", "what the group's store has")
        finally:
            dist.destroy_process_group()
    finally:
        dist.ProcessGroup.shutdown = shutdown  # type: ignore[method-assign]
    expect(seen, [group], "the groups whose end was told")


# ---- what collectives are given
def before_collectives(look: Callable[[list[Any]], None]) -> None:
    """Have `look(tensors)` run before a collective of torch.distributed takes these tensors."""
    for name, looking in _checks_that_look(look).items():
        setattr(collectives, name, looking)


def _checks_that_look(look: Callable[[list[Any]], None]) -> dict[str, Callable[..., None]]:
    """The two functions that every collective calls on its arguments, by name, each with `look` ahead of it."""
    return {name: _looking(getattr(collectives, name), look) for name in ("_check_single_tensor", "_check_tensor_list")}


def _looking(check: Callable[..., None], look: Callable[[list[Any]], None]) -> Callable[..., None]:
    @functools.wraps(check)
    def look_first(given: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(given, torch.Tensor):
            look([given])
        elif isinstance(given, list | tuple):
            look(list(given))
        check(given, *args, **kwargs)

    return look_first


@probe(
    "what collectives are given",
    "before_collectives",
    needed_for="refusing a rank's piece of a parameter in all_reduce() and the like",
    otherwise="all_reduce(p.grad) adds up elements of different places, without a word",
)
def _collectives_check_their_arguments() -> None:
    """Assumes: collectives look `_check_single_tensor` and `_check_tensor_list` up in their module when they run, and
    call them first."""

    class Seen(Exception):
        pass

    def look(tensors: list[Any]) -> None:
        raise Seen

    before = {name: getattr(collectives, name) for name in _checks_that_look(look)}
    before_collectives(look)
    try:
        expect(_raises(Seen, dist.all_reduce, tiny()), True, "whether all_reduce is seen")
        expect(_raises(Seen, dist.all_gather, [tiny()], tiny()), True, "whether all_gather is seen")
    finally:
        for name, check in before.items():
            setattr(collectives, name, check)


def _raises(error: type[Exception], run: Callable[..., Any], *args: Any) -> bool:
    try:
        run(*args)
    except error:
        return True
    return False
