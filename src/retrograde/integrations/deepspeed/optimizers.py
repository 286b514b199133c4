"""The config's optimizer section: torch's optimizers under DeepSpeed's names and with its defaults."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from retrograde.integrations.deepspeed.config import Section
from retrograde.integrations.deepspeed.refusals import ConfigError, not_yet, wrong

# DeepSpeed's own, which torch does not have.
_ELSEWHERE = {"lamb", "lion", "muon", "muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam"}


def make_optimizer(section: Section, parameters: Iterable[Any]) -> Optimizer:
    params = dict(section.params)
    if "max_grad_norm" in params:
        raise ConfigError(
            "optimizer.params.max_grad_norm: gradients are clipped by gradient_clipping; give that instead"
        )
    name = section.type.lower()
    if name in ("adam", "adamw"):
        kind = _adam(name, params)
    elif name in _ELSEWHERE:
        raise not_yet("optimizer.type", section.type, "give initialize(optimizer=...) one that is written in torch")
    else:
        kind = _torch_optimizer("Adagrad" if name == "adagrad" else section.type)
    try:
        return kind(parameters, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params: {kind.__name__} refuses {section.params}: {error}") from error


def _adam(name: str, params: dict[str, Any]) -> type[Optimizer]:
    """ "Adam" is AdamW there unless `adam_w_mode` is false. Takes out of `params` what torch does not know."""
    decoupled = params.pop("adam_w_mode", True) or name == "adamw"
    if params.pop("bias_correction", True) is not True:
        raise wrong("optimizer.params.bias_correction", False, "is not there", "true, or leave it out")
    if not params.pop("torch_adam", False):
        params.setdefault("weight_decay", 0.0)  # of DeepSpeed's own Adam; torch's AdamW has another
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _torch_optimizer(name: str) -> type[Optimizer]:
    kind = vars(torch.optim).get(name)
    if not isinstance(kind, type) or not issubclass(kind, Optimizer):
        raise wrong("optimizer.type", name, "is not known", "Adam, AdamW, Adagrad or a name from torch.optim")
    return kind
