"""How the device is built: once for all who come, and with a clear word if it cannot be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.accelerator import build

# Writes down what it is asked for, and takes its time.
COMPILER = """#!/bin/sh
echo run >> {log}
sleep 0.1
for last; do :; done
echo built > "$last"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def test_who_comes_at_once_builds_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, compiler = cache / "log", cache / "compiler"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(4) as pool:
        built = {each.result() for each in [pool.submit(build.build) for _ in range(4)]}
    assert len(built) == 1
    assert built.pop().read_text() == "built\n"
    assert len(log.read_text().splitlines()) == len(build.UNITS) + 1


def test_another_source_is_another_build(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in build.NATIVE.iterdir():
        (sources / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "NATIVE", sources)
    monkeypatch.setattr(build, "_make", lambda target, arguments: target.touch())
    before = build.build()
    assert build.build() == before
    with open(sources / "clock.h", "a") as header:
        header.write("\n")
    assert build.build() != before


def test_every_source_is_built() -> None:
    assert sorted(name for names in build.UNITS.values() for name in names) == sorted(
        path.name for path in build.NATIVE.glob("*.cpp")
    )


def test_a_missing_compiler_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.CompilerMissing, match="'no-such-compiler', which is not on PATH"):
        build.build()


def test_errors_of_the_compiler_are_shown(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))
    with pytest.raises(RuntimeError, match=r"(?s)could not make core-.*no-such-flag"):
        build.build()
