"""The formats of checkpoints, each of which is opened as a `Checkpoint`."""
