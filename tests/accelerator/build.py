"""Builds the test device's extension with g++, once for each state of its sources.

The result is kept in torch's own cache of extensions, outside of the checkout, under a hash of the sources, the flags
and torch's version. Several processes may come at once: the first one builds, the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "late_device"
NATIVE = Path(__file__).parent / "native"
FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-Wall", f"-DTORCH_EXTENSION_NAME={NAME}")
LIBRARIES = ("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python")

# Files that are compiled together: reading torch's headers takes longer than everything else.
UNITS = {
    "core": ("races.cpp", "scheduler.cpp", "memory.cpp", "runtime.cpp"),
    "device": ("tensors.cpp", "guard.cpp", "prediction.cpp", "fallback.cpp", "operators.cpp"),
    "group": ("group.cpp", "laboratory.cpp", "module.cpp"),
}


class CompilerMissing(RuntimeError):
    """Nothing can be built here; the message says what to install."""


def build() -> Path:
    """The shared library of the sources as they are."""
    folder = _cache()
    folder.mkdir(parents=True, exist_ok=True)
    headers = b"".join(path.read_bytes() for path in sorted(NATIVE.glob("*.h")))
    objects = {}
    for unit, names in UNITS.items():
        sources = [(NATIVE / name).read_bytes() for name in names]
        objects[unit] = folder / f"{unit}-{_hash(headers, *sources)}.o"
    library = folder / f"{NAME}-{_hash(*(path.name.encode() for path in objects.values()))}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the process, whatever becomes of it
        if not library.exists():
            for unit, target in objects.items():
                if not target.exists():
                    _compile(target, UNITS[unit])
            _make(library, ["-shared", *map(str, objects.values()), *_libraries()])
    return library


def _cache() -> Path:
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    return Path(root, NAME)


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256(repr((FLAGS, torch.__version__, sysconfig.get_python_version())).encode())
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def _compile(target: Path, names: Iterable[str]) -> None:
    together = target.with_suffix(".cpp")
    together.write_text("".join(f'#include "{NATIVE / name}"\n' for name in names))
    python = sysconfig.get_path("include")
    if not Path(python, "Python.h").exists():
        raise CompilerMissing(f"the test device needs Python's headers, and {python} has none: install python3-dev")
    folders = [*cpp_extension.include_paths(), python]
    _make(target, [*FLAGS, *(f"-isystem{folder}" for folder in folders), "-c", str(together)])


def _libraries() -> list[str]:
    return [*(f"-L{folder}" for folder in cpp_extension.library_paths()), *LIBRARIES]


def _make(target: Path, arguments: Iterable[str]) -> None:
    """Runs the compiler. A file under its own name is whole: one that was interrupted has another name."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise CompilerMissing(
            f"the test device is built from {NATIVE} and needs the C++ compiler {compiler!r}, which is not on PATH:"
            " install g++, or name another one in the environment variable CXX"
        )
    unfinished = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run([compiler, *arguments, "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{compiler} could not make {target.name}:\n{done.stderr}")
    unfinished.rename(target)


if __name__ == "__main__":
    print(build())
