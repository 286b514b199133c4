"""Assumptions about torch and Python, each with a probe that exercises it.

[Note: one door to torch's internals]
Whatever retrograde uses of torch that torch does not promise is in this package, under a name of our own.

Rule 1: a use has a probe beside it, which exercises exactly what is assumed, on tiny tensors. Its docstring says what
        is assumed.
Rule 2: a name that torch no longer has fails when it is called (`find`), so its probe fails, by name.
Rule 3: probes leave nothing behind: no random number is drawn, no patch stays, no group stays open.
Rule 4: importing starts no threads. A backward makes torch start one for each accelerator, after which a process may
        not fork, so probes that need one wait for the first model that is sharded.
Rule 5: what fails is an error, never a different behaviour. Probes that take longer (`When.DOCTOR`) run in `retrograde
        doctor` alone: ask it on a torch that was not tested.

All of them are listed in docs/design/internals.md, which `retrograde doctor --markdown` prints.
"""

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, NamedTuple

import torch

from retrograde.errors import InternalsChanged

TESTED = "2.13"  # the torch against which all of retrograde's tests run


class When(Enum):
    """When a probe runs, beside `retrograde doctor`, which runs all."""

    IMPORT = "import"
    FIRST_USE = "first shard() or Pipeline()"
    DOCTOR = "doctor only"


@dataclass(frozen=True)
class Probe:
    """An assumption about torch or Python, and the function that tries it."""

    name: str
    covers: tuple[str, ...]  # names of this package that rely on the assumption
    assumption: str
    needed_for: str
    otherwise: str  # what users would see without the probe, if the assumption did not hold
    when: When
    run: Callable[[], None]

    def failure(self) -> str | None:
        """Run the probe. Returns what it has found instead of what is assumed; None if the assumption holds."""
        try:
            with torch.inference_mode(mode=False), torch.enable_grad():
                self.run()
        except Exception as error:
            return str(error) or type(error).__name__
        return None


class FailedProbe(NamedTuple):
    """A probe whose assumption does not hold, and what it has found."""

    probe: Probe
    found: str


PROBES: list[Probe] = []

_PREFIX = "Assumes: "


def probe(
    name: str, *covers: str, needed_for: str, otherwise: str, when: When = When.IMPORT
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function that raises if an assumption does not hold. Its docstring is the assumption."""

    def register(run: Callable[[], None]) -> Callable[[], None]:
        text = " ".join((run.__doc__ or "").split())
        if not text.startswith(_PREFIX):
            raise ValueError(f"the docstring of {run.__name__} does not say what it assumes")
        PROBES.append(Probe(name, covers, text.removeprefix(_PREFIX), needed_for, otherwise, when, run))
        return run

    return register


def expect(found: Any, expected: Any, what: str) -> None:
    """Raise unless two values are equal. Probes use this, since `python -O` leaves out `assert`."""
    if found != expected:
        raise InternalsChanged(f"{what} is {found!r}, not {expected!r}")


def tiny(size: int = 2, requires_grad: bool = False) -> Any:
    """A tensor to try things on: ones, whatever the default device and dtype are.

    `Any`, because strict typing refuses calls of methods that torch has not typed."""
    return torch.ones(size, dtype=torch.float32, device="cpu", requires_grad=requires_grad)


def find(path: str) -> Any:
    """Find something by torch's private name, as "module:name", such as "torch._C:_storage_Use_Count" (Rule 2)."""
    module, _, rest = path.partition(":")
    try:
        found: Any = import_module(module)
        for name in rest.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return _missing(path.replace(":", "."))
    return found


def measured(measure: Callable[[], int]) -> int:
    """A number that depends on torch or Python. Where it cannot be measured it is -1, and a probe says why."""
    try:
        return measure()
    except InternalsChanged:
        return -1


def _missing(path: str) -> Callable[..., Any]:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise InternalsChanged(f"torch {torch.__version__} has no {path}")

    return missing


def failures(probes: Iterable[Probe]) -> list[FailedProbe]:
    found = [(each, each.failure()) for each in probes]
    return [FailedProbe(each, what) for each, what in found if what is not None]


def check(when: When) -> int:
    """Run the probes of this time. Returns how many there are; raises if an assumption does not hold."""
    due = [each for each in PROBES if each.when is when]
    failed = failures(due)
    if failed:
        raise InternalsChanged(describe(failed))
    return len(due)


def describe(failed: Sequence[FailedProbe]) -> str:
    """Describe which assumptions do not hold here, what needs them, and what to do."""
    where = f"torch {torch.__version__} on Python {platform.python_version()}"
    lines = [f"{where} is built otherwise than retrograde assumes (it is tested with torch {TESTED}):"]
    for one, found in failed:
        lines.append(
            f"- {one.name}: {one.assumption} Found: {found}. Needed for {one.needed_for}; otherwise {one.otherwise}."
        )
    lines.append(
        f'Install torch {TESTED} (pip install "torch=={TESTED}.*") or a version of retrograde made for this torch; '
        f"docs/design/internals.md lists everything that is assumed"
    )
    return "\n".join(lines)
