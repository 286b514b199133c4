"""Checkpoints of several kinds, each opened as a `Checkpoint`."""
