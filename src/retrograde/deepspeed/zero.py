"""`retrograde.deepspeed.zero`: the contexts of `deepspeed.zero`."""

from retrograde.integrations.deepspeed.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
