"""DeepSpeed's helpers for whole parameters, gradients and optimizer state. All ranks call them together."""

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
    """Set the parameter to `value`, which all ranks give."""
    with torch.no_grad():
        rg.parameter_of(param).copy_(value)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The whole gradient, reduced over ranks; None if there is none. One that waits in a window is reduced first."""
    grad = rg.parameter_of(param).grad
    return None if grad is None else rg.full_tensor(grad)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the gradient to `value`, which all ranks give."""
    rg.parameter_of(param).grad = value.clone()


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """The whole of what the optimizer keeps for this parameter under a key; None before its first update."""
    state = _state(rg.parameter_of(param)).get(optim_state_key)
    return None if state is None else rg.full_tensor(state)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Set what the optimizer keeps for this parameter under a key to `value`, which all ranks give."""
    state = _state(rg.parameter_of(param))
    if optim_state_key not in state:
        raise ConfigError(f"optim_state_key={optim_state_key!r} is not there; give one of {', '.join(state) or 'none'}")
    state[optim_state_key].copy_(value)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Mark modules and return them. DeepSpeed would gather the parameters in them together, since ranks use different
    ones. Here ranks may do that anyway, so nothing else happens."""
    names = {
        kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}" for kind in leaf_module_classes
    }
    found = [module for module in model.modules() if names & _names_of(type(module))]
    for module in found:
        vars(module)["_z3_leaf"] = True
    return found


def z3_leaf_module(model: nn.Module) -> bool:
    """Was the module marked by `set_z3_leaf_modules`?"""
    return "_z3_leaf" in vars(model)


def _names_of(kind: type) -> set[str]:
    """The names of a class and its bases: short, and with their modules."""
    return {name for each in kind.__mro__ for name in (each.__name__, f"{each.__module__}.{each.__qualname__}")}


def _state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    engine = engine_of(parameter)
    if engine is None or engine.optimizer is None:
        raise ConfigError("param: is not a parameter of an engine with an optimizer; give one of engine.parameters()")
    return dict(engine.optimizer.state.get(parameter, {}))
