"""`initialize()` makes DeepSpeed's engine of a model and a config."""

import argparse
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from retrograde.integrations.deepspeed.config import Config, Given
from retrograde.integrations.deepspeed.engine import DeepSpeedEngine
from retrograde.integrations.deepspeed.optimizers import make_optimizer
from retrograde.integrations.deepspeed.owners import remember
from retrograde.integrations.deepspeed.refusals import ConfigError, wrong
from retrograde.integrations.deepspeed.schedules import make_scheduler
from retrograde.integrations.deepspeed.words import missing

logger = logging.getLogger("retrograde.deepspeed")

Initialized = tuple[DeepSpeedEngine, Optimizer | None, "DataLoader[Any] | None", Any]
_REFUSED = ("mpu", "mesh_param")  # arguments for other parallelism, which is not there
_OF_A_GROUP = ("timeout", "init_method", "rank", "world_size")
_WITHOUT_EFFECT = ("distributed_port", "dist_init_required", "config_params")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Iterable[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: "Dataset[Any] | None" = None,
    lr_scheduler: Any = None,
    *,
    config: Given | None = None,
    collate_fn: Callable[..., Any] | None = None,
    **others: Any,
) -> Initialized:
    """Shard `model`, in place, as the config says. Returns engine, optimizer, data loader and scheduler.

    All ranks call it together. `optimizer` and `lr_scheduler` may be callables, which get the parameters and the
    optimizer; if given, they replace the config's sections. `args.deepspeed_config` may be the config."""
    if not isinstance(model, nn.Module):
        raise wrong("model", model, "is not a module", "an nn.Module")
    _check_others(others)
    init_distributed()
    asked = Config.of(_config_of(args, config, others.get("config_params")), dist.get_world_size())
    parameters = list(model_parameters) if model_parameters is not None else _trained(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    # These come before the model is sharded, so that nothing has changed if they raise.
    chosen = _optimizer(optimizer, parameters, names, asked)
    scheduler = _scheduler(lr_scheduler, chosen, asked)
    _say_what_has_no_effect(asked)
    engine = DeepSpeedEngine(model, asked.shard(model), chosen, scheduler, asked)
    remember(engine)
    loader = None if training_data is None else _loader(training_data, collate_fn, asked)
    return engine, chosen, loader, scheduler


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Make torch's process group, unless there is one. DeepSpeed's options that torch has too are passed on."""
    if not dist.is_initialized():
        used = {name: value for name, value in options.items() if name in _OF_A_GROUP and value != -1}
        dist.init_process_group(dist_backend or "gloo", **used)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="taken for scripts that have it; nothing asks for it")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the config, a JSON file")
    return parser


def _check_others(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name in _REFUSED and value is not None:
            raise missing(name)
        if name not in (*_REFUSED, *_WITHOUT_EFFECT):
            raise TypeError(f"initialize() got an unexpected keyword argument {name!r}")


def _config_of(args: Any, config: Given | None, older: Given | None) -> Given:
    on_command_line = None if args is None else vars(args).get("deepspeed_config")
    given = [each for each in (config, older, on_command_line) if each is not None]
    if len(given) != 1:
        cause = "is there more than once" if given else "is missing"
        raise ConfigError(f"config: {cause}; give initialize(config=...) or args.deepspeed_config")
    return given[0]


def _say_what_has_no_effect(config: Config) -> None:
    if config.idle and dist.get_rank() == 0:
        lines = [f"  {word.key}: {word.became}" for word in config.idle]
        logger.warning("\n".join(["keys of the config that have no effect:", *lines]))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _optimizer(given: Any, parameters: list[Any], names: Mapping[Any, str], config: Config) -> Optimizer | None:
    if isinstance(given, Optimizer):
        return given
    if given is not None:
        made = given(parameters) if callable(given) else None
        if not isinstance(made, Optimizer):
            raise wrong("optimizer", given, "is not an optimizer", "a torch optimizer or a function that makes one")
        return made
    return None if config.optimizer is None else make_optimizer(config.optimizer, parameters, names)


def _scheduler(given: Any, optimizer: Optimizer | None, config: Config) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) else given
    if config.scheduler is None:
        return None
    if optimizer is None:
        raise ConfigError("scheduler: there is no optimizer; give initialize() one, or the config a section of it")
    return make_scheduler(config.scheduler, optimizer)


def _loader(data: "Dataset[Any]", collate_fn: Callable[..., Any] | None, config: Config) -> "DataLoader[Any]":
    """Make a loader of this rank's part of the data, in micro batches."""
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    drop_last = config.drop_last
    return DataLoader(data, config.batch.micro, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last)
