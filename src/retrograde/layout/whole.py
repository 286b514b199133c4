"""Which parameters are to be held whole, each by one rank: what users say with `shard(whole=...)`.

Matrix optimizers (Muon, Shampoo) compute with all of a matrix. A rank that has all of it, of its gradient and of its
momentum updates it alone, and so ranks share the matrices among them. owners.py says which rank has which.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from retrograde.arguments import sequence, shown, wrong
from retrograde.errors import ShardingError

Listed = str | nn.Parameter | nn.Module  # a parameter or its name, or a module or its name for all that it has
Whole = None | str | nn.Module | Sequence[Listed] | Callable[[str, nn.Parameter], bool]

_WORDS: dict[str, Callable[[str, nn.Parameter], bool]] = {
    "matrices": lambda name, param: param.dim() == 2,
    "all": lambda name, param: True,
}
_FIX = '"matrices", "all", a module, a list of parameters, modules or their names, or a predicate of (name, parameter)'


def whole_parameters(model: nn.Module, whole: Whole) -> set[int]:
    """The identities of the parameters that are meant."""
    return {id(param) for _, param in _chosen_parameters(model, whole)}


def whole_names(model: nn.Module, whole: Whole) -> list[str]:
    """The names of the parameters that are meant; they mean the same in a copy of the model."""
    return [name for name, _ in _chosen_parameters(model, whole)]


def _chosen_parameters(model: nn.Module, whole: Whole) -> Iterator[tuple[str, nn.Parameter]]:
    chosen = _predicate(model, whole)
    return ((name, param) for name, param in model.named_parameters() if chosen(name, param))


def _predicate(model: nn.Module, whole: Whole) -> Callable[[str, nn.Parameter], bool]:
    if whole is None:
        return lambda name, param: False
    if isinstance(whole, str):
        if whole not in _WORDS:
            raise wrong("whole", whole, "is not known", _FIX)
        return _WORDS[whole]
    if isinstance(whole, nn.Module):
        listed: list[Listed] = [whole]
    elif callable(whole):
        return whole
    else:
        listed = sequence("whole", whole, _FIX)
    found = {id(param) for each in listed for param in _meant(model, each)}
    return lambda name, param: id(param) in found


def _meant(model: nn.Module, each: Listed) -> list[nn.Parameter]:
    params = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(each, str):
        if each in params:
            return [params[each]]
        if each in modules:
            return list(modules[each].parameters())
        raise ShardingError(f"whole: the model has no parameter or module {each!r}; give {_FIX}")
    if isinstance(each, nn.Module):
        if not any(each is module for module in modules.values()):
            raise ShardingError(f"whole: {type(each).__name__} is not a module of the model; give {_FIX}")
        return list(each.parameters())
    if not any(each is param for param in params.values()):
        raise ShardingError(f"whole: {shown(each)} is not a parameter of the model; give {_FIX}")
    return [each]
