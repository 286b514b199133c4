"""DeepSpeed's helpers for whole parameters, gradients and optimizer state: for all ranks together."""

from collections.abc import Sequence

import torch
from torch import nn

import retrograde as rg
from retrograde.integrations.deepspeed.owners import engine_of
from retrograde.integrations.deepspeed.refusals import ConfigError


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """A copy of the whole parameter."""
    return rg.full_tensor(rg.parameter_of(param)).detach().clone()


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """The parameter becomes `value`, which all ranks give."""
    with torch.no_grad():
        rg.parameter_of(param).copy_(value)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The whole gradient, the mean over ranks; None if there is none. What waits in a window is reduced for it."""
    grad = rg.parameter_of(param).grad
    return None if grad is None else rg.full_tensor(grad)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """The gradient becomes `value`, which all ranks give."""
    rg.parameter_of(param).grad = value.clone()


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """What the optimizer keeps under a name for this parameter, whole; None before its first update."""
    state = _state(rg.parameter_of(param)).get(optim_state_key)
    return None if state is None else rg.full_tensor(state)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """What the optimizer keeps under a name becomes `value`, which all ranks give."""
    state = _state(rg.parameter_of(param))
    if optim_state_key not in state:
        raise ConfigError(f"optim_state_key={optim_state_key!r} is not there; give one of {', '.join(state) or 'none'}")
    state[optim_state_key].copy_(value)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Modules whose parameters DeepSpeed is to gather together, because ranks use different ones of them. Here ranks
    may do that anyway: they are marked and returned, and nothing else happens."""
    names = {
        kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}" for kind in leaf_module_classes
    }
    found = [module for module in model.modules() if names & _names_of(type(module))]
    for module in found:
        vars(module)["_z3_leaf"] = True
    return found


def z3_leaf_module(model: nn.Module) -> bool:
    """Was it marked?"""
    return "_z3_leaf" in vars(model)


def _names_of(kind: type) -> set[str]:
    """Of a class and those it derives from: short, and with their modules."""
    return {name for each in kind.__mro__ for name in (each.__name__, f"{each.__module__}.{each.__qualname__}")}


def _state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    engine = engine_of(parameter)
    if engine is None or engine.optimizer is None:
        raise ConfigError("param: is not a parameter of an engine with an optimizer; give one of engine.parameters()")
    return dict(engine.optimizer.state.get(parameter, {}))
