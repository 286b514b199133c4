"""DeepSpeed's interface over retrograde, for programs written for DeepSpeed, with the import changed."""

from retrograde.integrations.deepspeed.engine import DeepSpeedEngine
from retrograde.integrations.deepspeed.initialize import add_config_arguments, init_distributed, initialize
from retrograde.integrations.deepspeed.refusals import ConfigError, NotYetError

__all__ = [
    "ConfigError",
    "DeepSpeedEngine",
    "NotYetError",
    "add_config_arguments",
    "init_distributed",
    "initialize",
]
