"""The config's optimizer section: torch's optimizers under DeepSpeed's names and with its defaults."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from retrograde.integrations.deepspeed.config import Section
from retrograde.integrations.deepspeed.refusals import ConfigError, not_yet, wrong

# DeepSpeed's own optimizers, which torch does not have.
_ELSEWHERE = {"lamb", "lion", "muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam"}


# DeepSpeed's Muon leaves parameters with these in their names to an Adam, as well as those that are no matrices.
_NOT_MUONS = ("embed", "lm_head")
_NS_METHODS = ("gram", "standard")


def make_optimizer(section: Section, parameters: list[Any], names: Mapping[Any, str]) -> Optimizer:
    """Make the optimizer of the config's section. `names`: those of the model's parameters."""
    params = dict(section.params)
    if "max_grad_norm" in params:
        raise ConfigError(
            "optimizer.params.max_grad_norm: gradients are clipped by gradient_clipping; give that instead"
        )
    name = section.type.lower()
    if name in ("adam", "adamw"):
        kind = _adam(name, params)
    elif name == "muon":
        kind = _muon(params, parameters, names)
    elif name in _ELSEWHERE:
        raise not_yet("optimizer.type", section.type, "give initialize(optimizer=...) one that is written in torch")
    else:
        kind = _torch_optimizer("Adagrad" if name == "adagrad" else section.type)
    try:
        return kind(parameters, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {kind.__name__} refuses {section.params}: {error}") from error


def _adam(name: str, params: dict[str, Any]) -> type[Optimizer]:
    """DeepSpeed's "Adam" is AdamW unless `adam_w_mode` is false. Removes from `params` what torch does not know."""
    decoupled = params.pop("adam_w_mode", True) or name == "adamw"
    if params.pop("bias_correction", True) is not True:
        raise wrong("optimizer.params.bias_correction", False, "is not there", "true, or leave it out")
    if not params.pop("torch_adam", False):
        params.setdefault("weight_decay", 0.0)  # the default of DeepSpeed's own Adam; torch's AdamW has another
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _muon(params: dict[str, Any], parameters: list[Any], names: Mapping[Any, str]) -> type[Optimizer]:
    """torch's Muon, with DeepSpeed's names and defaults. Raises if DeepSpeed would use its Adam for some parameters."""
    given = [each["params"] if isinstance(each, dict) else [each] for each in parameters]
    for parameter in itertools.chain.from_iterable(given):
        name = names.get(parameter, "a parameter that is not the model's")
        if parameter.ndim != 2 or any(part in name.lower() for part in _NOT_MUONS):
            raise not_yet(
                "optimizer.type",
                f"Muon with an Adam for what is not Muon's ({name}, of shape {tuple(parameter.shape)})",
                "give initialize() model_parameters that are matrices, or an optimizer of your own",
            )
    method = params.pop("ns_method", "gram")
    if method not in _NS_METHODS:
        raise wrong("optimizer.params.ns_method", method, "is not known", " or ".join(map(repr, _NS_METHODS)))
    for of_adam in ("adam_lr", "betas", "eps"):
        params.pop(of_adam, None)
    rate = params.pop("lr", 0.02)
    params["lr"] = params.pop("muon_lr", rate)
    params.setdefault("weight_decay", 0.0)
    return torch.optim.Muon


def _torch_optimizer(name: str) -> type[Optimizer]:
    kind = vars(torch.optim).get(name)
    if not isinstance(kind, type) or not issubclass(kind, Optimizer):
        raise wrong("optimizer.type", name, "is not known", "Adam, AdamW, Adagrad or a name from torch.optim")
    return kind
