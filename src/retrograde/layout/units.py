"""Which parameters are gathered and reduced together.

Automatic units are the repeated blocks of the model: siblings of one class, two or more, that have
submodules with parameters, outermost first. Everything else is the root unit. A parameter belongs to the
first unit in which it is met, so a tied weight has one home however many modules use it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from retrograde.arguments import shown, wrong
from retrograde.errors import ShardingError
from retrograde.torch_internals import own_parameters

Units = str | type[nn.Module] | tuple[type[nn.Module], ...] | list[type[nn.Module]] | Callable[[nn.Module], bool]

Named = tuple[str, nn.Parameter]

ROOT = "(root)"


class UnitSpec(NamedTuple):
    """Parameters that are to form a unit, and the modules that they were found in."""

    name: str
    modules: tuple[nn.Module, ...]
    params: tuple[Named, ...]


def find_units(
    model: nn.Module, units: Units, join: float = 0, wanted: Callable[[nn.Parameter], bool] = lambda param: True
) -> list[UnitSpec]:
    """Partition the model's parameters (those `wanted`), in module order; the root unit comes first."""
    chosen = _chosen(model, units)
    members: dict[str, tuple[nn.Module, list[Named]]] = {ROOT: (model, [])}
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str, home: list[Named]) -> None:
        for name, param in own_parameters(module).items():
            if param is not None and id(param) not in seen and wanted(param):
                seen.add(id(param))
                home.append((prefix + name, param))
        for name, child in module.named_children():
            path = prefix + name
            if child in chosen:
                _, own = members.setdefault(path, (child, []))
                walk(child, path + ".", own)
            else:
                walk(child, path + ".", home)

    walk(model, "", members[ROOT][1])
    specs = [part for name, (module, params) in members.items() for part in _by_dtype(name, module, params)]
    return _joined(specs, join)


def _joined(specs: list[UnitSpec], least: float) -> list[UnitSpec]:
    """A unit of fewer than `least` bytes becomes one with the next, as long as it has fewer."""
    found: list[UnitSpec] = []
    for spec in specs:
        if found and _joins(found[-1], spec, least):
            last = found.pop()
            found.append(UnitSpec(f"{last.name}+{spec.name}", last.modules + spec.modules, last.params + spec.params))
        else:
            found.append(spec)
    return found


def _joins(one: UnitSpec, other: UnitSpec, least: float) -> bool:
    """Whether `one` is too small to stand alone and `other` can be in a buffer with it.

    The root unit always stands alone: it is in use from one end of a step to the other.
    """
    if one.name.startswith(ROOT):
        return False
    kinds = {(param.dtype, param.device) for _, param in one.params + other.params}
    return len(kinds) == 1 and sum(param.nbytes for _, param in one.params) < least


def _by_dtype(name: str, module: nn.Module, params: list[Named]) -> Iterator[UnitSpec]:
    """A flat buffer has one dtype and device, so a mixed unit becomes one unit for each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Named]] = {}
    for item in params:
        kinds.setdefault((item[1].dtype, item[1].device), []).append(item)
    for (dtype, device), part in kinds.items():
        label = name if len(kinds) == 1 else f"{name}[{str(dtype).removeprefix('torch.')}@{device}]"
        yield UnitSpec(label, (module,), tuple(part))


def check_units(units: Units) -> None:
    """Raise unless `units` says which modules are units, whatever the model is."""
    if isinstance(units, str) and units == "auto":
        return
    if isinstance(units, type | tuple | list):
        for cls in _classes(units):
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                raise ShardingError(f"units: {shown(cls)} is not a module class; give classes of modules in the model")
        return
    if isinstance(units, str) or not callable(units):
        raise wrong("units", units, "is not known", '"auto", module classes or a predicate')


def _classes(units: type | tuple[type, ...] | list[type]) -> tuple[type, ...]:
    return (units,) if isinstance(units, type) else tuple(units)


def _chosen(model: nn.Module, units: Units) -> set[nn.Module]:
    check_units(units)
    if isinstance(units, str):
        return set(_repeated_blocks(model))
    if isinstance(units, type | tuple | list):
        classes = _classes(units)
        for cls in classes:
            if not any(isinstance(m, cls) for m in model.modules()):
                raise ShardingError(
                    f"units: no module of class {cls.__name__} in {type(model).__name__}; "
                    f"its classes are {', '.join(sorted({type(m).__name__ for m in model.modules()}))}"
                )
        return {m for m in model.modules() if isinstance(m, classes) and m is not model}
    return {m for m in model.modules() if m is not model and units(m)}


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = [c for c in module.children() if any(True for _ in c.parameters())]
    blocks = [c for c in children if not isinstance(c, nn.ModuleList | nn.ModuleDict)]  # lists do not compute
    kinds = Counter(type(c) for c in blocks if any(True for _ in c.children()))
    for child in children:
        if kinds[type(child)] >= 2:
            yield child
        else:
            yield from _repeated_blocks(child)
