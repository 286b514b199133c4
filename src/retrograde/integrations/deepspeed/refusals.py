"""Errors of the front end: each names the key or the argument, the cause and the way out."""

from typing import Any

import retrograde as rg

LONGEST = 60  # characters of a value in an error


class ConfigError(rg.RetrogradeError, ValueError):
    """A config, or an argument of a call, cannot be used."""


class NotYetError(rg.UnsupportedError, NotImplementedError):
    """DeepSpeed has this, and retrograde does not have it yet."""


def wrong(name: str, value: Any, cause: str, fix: str) -> ConfigError:
    text = repr(value)
    if len(text) > LONGEST:
        text = f"{type(value).__name__}(...)"
    return ConfigError(f"{name}={text} {cause}; give {fix}")


def not_yet(name: str, what: str, instead: str) -> NotYetError:
    return NotYetError(f"{name}: {what} is not there yet; {instead}")
