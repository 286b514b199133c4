"""Folders that become checkpoints at one moment, and what can be found after a crash.

[Note: one moment]
A checkpoint is written into a folder beside its own, and renamed when all of it is on the disk.

    .name.saving      being written; with the marker (marker.py) in it, complete
    name              the checkpoint
    .name.previous    the one that `name` was before, until the new one is there

Rule 1: the marker is written last. A folder without it is not a checkpoint.
Rule 2: `name` is renamed to `.name.previous`, then `.name.saving` to `name`. Between the two, both are complete.
Rule 3: whoever looks for `name` and does not find it takes `.name.saving` if it is complete, else `.name.previous`.
Rule 4: a save first finishes what a crash has interrupted, so it never removes the only good one.
"""

import os
import re
import shutil
from pathlib import Path

from retrograde.checkpoint.marker import MARKER, Marker
from retrograde.errors import CheckpointError

METADATA = ".metadata"  # torch's name for the file
_SAVING = ".{}.saving"
_PREVIOUS = ".{}.previous"
_HIDDEN = re.compile(r"\.(.+)\.(?:saving|previous)")


def saving_folder(path: Path) -> Path:
    return path.with_name(_SAVING.format(path.name))


def _previous_folder(path: Path) -> Path:
    return path.with_name(_PREVIOUS.format(path.name))


def is_complete(folder: Path) -> bool:
    return (folder / MARKER).is_file()


# ---- writing
def prepare(path: Path) -> Path:
    """Finish what a crash has interrupted (Rule 4), and make an empty folder to write to."""
    if path.exists() and not (path.is_dir() and (is_complete(path) or _is_replaceable(path))):
        raise CheckpointError(
            f"path={str(path)!r} is there and is not a checkpoint; give another path, or remove what is there"
        )
    saving, previous = saving_folder(path), _previous_folder(path)
    if not path.exists() and is_complete(saving):
        saving.rename(path)
    elif not path.exists() and previous.exists():
        previous.rename(path)
    for leftover in (saving, previous):
        if leftover.exists():
            discard(leftover)
    saving.mkdir(parents=True)
    return saving


def _is_replaceable(folder: Path) -> bool:
    return (folder / METADATA).is_file() or not any(folder.iterdir())


def commit(path: Path) -> None:
    """Make the written folder the checkpoint (Rule 2)."""
    saving, previous = saving_folder(path), _previous_folder(path)
    sync_folder(saving)
    if path.exists():
        path.rename(previous)
    saving.rename(path)
    sync_folder(path.parent)
    if previous.exists():
        discard(previous)


def discard(folder: Path) -> None:
    """Remove a folder, its marker first: if this is interrupted, what is left is not a checkpoint (Rule 1)."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- looking
def find(path: Path) -> Path:
    """The folder of the checkpoint `path`, or of the last saved one among those in `path`."""
    found = _resolve(path)
    if found is None and path.is_dir():
        found = _last_saved(path)
    if found is None:
        what = "has no checkpoint in it" if path.is_dir() else "is not there"
        raise CheckpointError(f"path={str(path)!r} {what}; give the folder of a checkpoint, or a folder of several")
    return found


def _resolve(path: Path) -> Path | None:
    """The folder that has the checkpoint `path`, maybe under another name (Rule 3); None if there is none."""
    if path.is_dir() and (is_complete(path) or (path / METADATA).is_file()):
        return path
    for other in (saving_folder(path), _previous_folder(path)):
        if not path.exists() and is_complete(other):
            return other
    return None


def _last_saved(folder: Path) -> Path | None:
    names = set()
    for child in folder.iterdir():
        hidden = _HIDDEN.fullmatch(child.name)
        names.add(hidden.group(1) if hidden else child.name)
    found = [resolved for name in names if (resolved := _resolve(folder / name)) is not None and is_complete(resolved)]
    return max(found, key=lambda each: Marker.read(each).saved_at, default=None)


# ---- keeping
def check_keep(path: Path) -> None:
    if re.search(r"\d", path.name) is None:
        raise CheckpointError(
            f"keep: {path.name!r} has no number, by which others of its kind would be known; give a path such as "
            f"{str(path) + '-100'!r} to each, or leave keep away"
        )


def keep_last(path: Path, count: int) -> list[Path]:
    """Remove the oldest checkpoints whose names differ from that of `path` in numbers only, so that `count` stay."""
    kind = re.compile(r"\d+".join(map(re.escape, re.split(r"\d+", path.name))))
    alike = [each for each in path.parent.iterdir() if kind.fullmatch(each.name) and is_complete(each)]
    alike.sort(key=lambda each: (each == path, Marker.read(each).saved_at), reverse=True)
    for old in alike[count:]:
        discard(old)
    return alike[count:]
