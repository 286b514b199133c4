"""Opens a folder in the format that it has."""

from pathlib import Path

from retrograde.checkpoint.folders import find
from retrograde.checkpoint.formats.deepspeed import is_deepspeed, open_deepspeed
from retrograde.checkpoint.formats.distributed import open_distributed
from retrograde.checkpoint.stored import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    return open_deepspeed(path) if is_deepspeed(path) else open_distributed(find(path))
