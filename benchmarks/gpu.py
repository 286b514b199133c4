"""Everything that nobody has run on real accelerators yet, in one command, with a report to send back.

    make gpu-test
    python -m benchmarks.gpu [--tiny] [--device late] [--world 2] [--sections matrix training] [--into report.md]

It needs `torch.accelerator` and a backend of torch.distributed for it (CUDA with NCCL, for instance); where there is
none it says so in a line and ends. Each section has processes of its own: what fails in one is in the report, and the
next one runs. `--device late` or `cpu` with `--tiny` runs all of it on the test device, or the host, as a test does.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.multiprocessing as mp

from benchmarks.gpu_rank import FULL, SECTIONS, TINY, Sizes, run

LIMIT = 3600.0  # seconds for a section
REPORT = Path("benchmarks/results/gpu-report.md")
TORCHTITAN = "For comparison: torchtitan reports 5,762 tokens a second and GPU for Llama 3.1 8B on 8 H100."


def accelerator() -> str | None:
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def play(section: str, kind: str, world: int, sizes: Sizes, folder: Path, limit: float) -> list[str]:
    """The lines of a section, and how it ended if not well."""
    into = folder / f"{section}.md"
    began = time.monotonic()
    args = (world, kind, section, sizes, str(folder / f"{section}.store"), str(into))
    ranks = mp.start_processes(run, args, nprocs=world, join=False, start_method="spawn")
    assert ranks is not None
    ending = []
    try:
        while not ranks.join(timeout=1.0, grace_period=5.0):
            if time.monotonic() - began > limit:
                raise TimeoutError(f"no end within {limit:.0f} s")
    except (TimeoutError, mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        ending = ["", "FAILED:", "", "```", str(error).strip()[-3000:], "```"]
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    lines = into.read_text().splitlines() if into.exists() else []
    return [*lines, *ending, "", f"({time.monotonic() - began:.0f} s)"]


def heading(kind: str, world: int, tiny: bool) -> list[str]:
    name = kind
    if kind == "cuda":
        name = f"{world} x {torch.cuda.get_device_name(0)}"
    size = "tiny sizes: a smoke test, whose figures say nothing" if tiny else "full sizes"
    return [
        "# retrograde on an accelerator",
        "",
        f"{name}; torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}; {size}.",
    ]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("late", "cpu"), help="instead of torch.accelerator's")
    parser.add_argument("--world", type=int, default=0, help="ranks; by default one for each device")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--into", type=Path, default=REPORT)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a section")
    asked = parser.parse_args(given)
    kind = asked.device or accelerator()
    if kind is None:
        print("no accelerator here: nothing was run (torch.accelerator finds none)")
        return 0
    world = asked.world or (2 if asked.device else torch.accelerator.device_count())
    lines = heading(kind, world, asked.tiny)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for section in asked.sections:
            print(section, flush=True)
            found = play(section, kind, world, TINY if asked.tiny else FULL, Path(folder), asked.limit)
            failed += "FAILED:" in found
            says = (SECTIONS[section].__doc__ or "").strip()
            lines += ["", f"## {section}", "", says, "", *found]
            if section == "training":
                lines += ["", TORCHTITAN]
    asked.into.parent.mkdir(parents=True, exist_ok=True)
    asked.into.write_text("\n".join(lines) + "\n")
    print(f"the report is in {asked.into}; {failed} of {len(asked.sections)} sections failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
