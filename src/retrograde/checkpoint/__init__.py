"""Checkpoints: saving, loading, export and import of weights."""

from retrograde.checkpoint.api import load, save

__all__ = ["load", "save"]
