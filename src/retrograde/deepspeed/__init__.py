"""`import retrograde.deepspeed as deepspeed`: DeepSpeed's interface (docs/from_deepspeed.md)."""

from retrograde.deepspeed import utils, zero
from retrograde.integrations.deepspeed import (
    ConfigError,
    DeepSpeedEngine,
    NotYetError,
    add_config_arguments,
    init_distributed,
    initialize,
)

__all__ = [
    "ConfigError",
    "DeepSpeedEngine",
    "NotYetError",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "utils",
    "zero",
]
