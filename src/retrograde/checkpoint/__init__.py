"""Checkpoints: saving, loading, export and import of weights."""

from retrograde.checkpoint.api import export, load, load_pretrained, save

__all__ = ["export", "load", "load_pretrained", "save"]
