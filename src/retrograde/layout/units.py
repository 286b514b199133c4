"""Which parameters are gathered and reduced together.

Automatic units are the repeated blocks of the model: siblings of one class, two or more, that have
submodules with parameters, outermost first. Everything else is the root unit. A parameter belongs to the
first unit in which it is met, so a tied weight has one home however many modules use it. Those of a unit that are to
be whole (whole.py) are a unit beside it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from retrograde.arguments import shown, wrong
from retrograde.errors import ShardingError
from retrograde.layout.precision import AS_IT_IS, Dtypes, Precision
from retrograde.layout.whole import Whole, whole_parameters
from retrograde.torch_internals import own_parameters

Units = str | type[nn.Module] | tuple[type[nn.Module], ...] | list[type[nn.Module]] | Callable[[nn.Module], bool]

Named = tuple[str, nn.Parameter]

ROOT = "(root)"


class UnitSpec(NamedTuple):
    """Parameters that are to form a unit, and the modules that they were found in."""

    name: str
    modules: tuple[nn.Module, ...]
    params: tuple[Named, ...]
    dtypes: Dtypes
    whole: bool = False  # each parameter is held by one rank
    shard_of: tuple[int, ...] | None = None  # of such a unit: the shard that has each of them (owners.py)

    @property
    def device(self) -> torch.device:
        return self.params[0][1].device


class _Found(NamedTuple):
    """A parameter, the dtypes that it is to have, and whether one rank is to hold all of it."""

    named: Named
    dtypes: Dtypes
    whole: bool


def find_units(
    model: nn.Module,
    units: Units,
    join: float = 0,
    wanted: Callable[[nn.Parameter], bool] = lambda param: True,
    precision: Precision = AS_IT_IS,
    whole: Whole = None,
) -> list[UnitSpec]:
    """Partition the model's parameters (those `wanted`), in module order; the root unit comes first."""
    listed = whole_parameters(model, whole)
    chosen = _chosen(model, units)
    members: dict[str, tuple[nn.Module, list[_Found]]] = {ROOT: (model, [])}
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str, home: list[_Found], kept: bool) -> None:
        kept = kept or precision.keeps(module)
        for name, param in own_parameters(module).items():
            if param is not None and id(param) not in seen and wanted(param):
                seen.add(id(param))
                dtypes = precision.dtypes(param.dtype, kept)
                home.append(_Found((prefix + name, param), dtypes, id(param) in listed))
        for name, child in module.named_children():
            path = prefix + name
            if child in chosen:
                _, own = members.setdefault(path, (child, []))
                walk(child, path + ".", own, kept)
            else:
                walk(child, path + ".", home, kept)

    walk(model, "", members[ROOT][1], kept=False)
    specs = [part for name, (module, found) in members.items() for part in _by_kind(name, module, found)]
    return _joined(specs, join)


def _joined(specs: list[UnitSpec], least: float) -> list[UnitSpec]:
    """Make a unit of fewer than `least` bytes one with the next, as long as it has fewer."""
    found: list[UnitSpec] = []
    for spec in specs:
        if found and _joins(found[-1], spec, least):
            last = found.pop()
            name = f"{last.name}+{spec.name}"
            modules, params = last.modules + spec.modules, last.params + spec.params
            found.append(last._replace(name=name, modules=modules, params=params))
        else:
            found.append(spec)
    return found


def _joins(one: UnitSpec, other: UnitSpec, least: float) -> bool:
    """Whether `one` is too small to stand alone and `other` can be in a buffer with it.

    The root unit always stands alone: it is in use from one end of a step to the other.
    """
    if one.name.startswith(ROOT):
        return False
    alike = (one.dtypes, one.device, one.whole) == (other.dtypes, other.device, other.whole)
    return alike and sum(param.numel() for _, param in one.params) * one.dtypes.page.itemsize < least


def _by_kind(name: str, module: nn.Module, found: list[_Found]) -> Iterator[UnitSpec]:
    """Make one unit for each kind of parameters found. A flat buffer has one dtype and device, and so have the masters;
    either all of its parameters are cut or none."""
    kinds: dict[tuple[Dtypes, torch.device, bool], list[Named]] = {}
    for each in found:
        kinds.setdefault((each.dtypes, each.named[1].device, each.whole), []).append(each.named)
    several = len({(dtypes, device) for dtypes, device, _ in kinds}) > 1
    for (dtypes, device, whole), part in kinds.items():
        label = f"{name}[{_called(dtypes)}@{device}]" if several else name
        yield UnitSpec(f"{label}[whole]" if whole else label, (module,), tuple(part), dtypes, whole)


def _called(dtypes: Dtypes) -> str:
    names = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes)]
    return " of ".join(names)


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
