"""The state of optimizers by the names of parameters, as torch's `get_optimizer_state_dict` has it.

`optimizer.state_dict()` numbers parameters in the order in which this rank's optimizer was given them. Names mean the
same in another run, with other groups, and on a rank that has other stages of a pipeline.

    {"state": {"embed.weight": {"exp_avg": ...}}, "param_groups": [{"lr": ..., "params": ["embed.weight", ...]}]}
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from retrograde.errors import CheckpointError
from retrograde.parameters.ownership import updated_elsewhere

StateByName = dict[str, Any]
_NAMES = "param_names"  # torch's key for the names that a group's parameters were given with


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter with its first name."""
    return {param: name for name, param in model.named_parameters()}


def numbered_names(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[str]:
    """The names of an optimizer's parameters, in the order in which it numbers them."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in names:
                raise CheckpointError(
                    f"optimizer: group {number} of {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(param.shape)} that is not in the model; give the model that has it"
                )
            found.append(names[param])
    return found


def named_state(optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]) -> StateByName:
    """The state of several optimizers, each with parameters of its own, as one."""
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        own = numbered_names(optimizer, names)
        taken = {name for group in groups for name in group["params"]}.intersection(own)
        if taken:
            raise CheckpointError(f"optimizer: parameter {min(taken)} is in two of them; give each to one optimizer")
        numbered = optimizer.state_dict()
        elsewhere = {names[param] for param in updated_elsewhere(optimizer)}
        for number, kept in numbered["state"].items():
            name = own[number] if isinstance(number, int) else number
            if name in state:
                raise CheckpointError(f"optimizer: two of them keep something under {name!r}; save them as extra")
            if name not in elsewhere:
                state[name] = kept
        for group in numbered["param_groups"]:
            groups.append({**group, "params": [own[number] for number in group["params"]]})
    return {"state": state, "param_groups": groups}


def numbered_state(named: StateByName, optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """This optimizer's part of a state by names, for its `load_state_dict()`."""
    own = numbered_names(optimizer, names)
    number_of = {name: number for number, name in enumerate(own)}
    state = {number_of[name]: kept for name, kept in named["state"].items() if name in number_of}
    state |= {name: kept for name, kept in named["state"].items() if name not in names.values()}
    groups = []
    for group in optimizer.param_groups:
        mine = [names[param] for param in group["params"]]
        groups.append({**_options_for(mine, group, named["param_groups"]), "params": [number_of[n] for n in mine]})
    return {"state": state, "param_groups": groups}


def _options_for(
    mine: Sequence[str], group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The options of a group, learning rate and the like, from the saved group that has these parameters."""
    group_of = {name: number for number, each in enumerate(saved) for name in each["params"]}
    found = {group_of[name]: name for name in reversed(mine) if name in group_of}
    if not found:
        return group  # of parameters that were not trained then
    first, *others = sorted(found)
    for other in others:
        if options(saved[other]) != options(saved[first]):
            raise CheckpointError(
                f"optimizer: {found[first]} and {found[other]} are in one group here, and were saved in two with "
                f"different options; make the groups as they were"
            )
    return {**group, **options(saved[first])}


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group has besides its parameters. (Optimizers that were given `named_parameters()` have names of each.)"""
    return {key: value for key, value in group.items() if key not in ("params", _NAMES)}


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**options(group), "params": group["params"]}


def merged_groups(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The groups of all ranks, of which each may have other parameters: groups at one place with the same options are
    one."""
    merged: list[dict[str, Any]] = []
    for groups in by_rank:
        for place, group in enumerate(map(_without_names, groups)):
            if place < len(merged) and options(merged[place]) == options(group):
                known = set(merged[place]["params"])
                merged[place]["params"] += [name for name in group["params"] if name not in known]
            elif not any(set(group["params"]) <= set(other["params"]) for other in merged):
                merged.append({**group, "params": list(group["params"])})
    return merged
