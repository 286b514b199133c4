"""Export: writes the weights of a sharded model, or of a checkpoint, as safetensors files, a tensor at a time.

All ranks plan the same files. Each file is written by one rank, which reads the pages it needs from the others while
they write theirs: no rank ever has more than the pages of two units, and no tensor is gathered for nothing.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from retrograde.checkpoint.formats.opening import open_checkpoint
from retrograde.checkpoint.formats.weights import Weight, WeightFile, forget_index, plan_files, write_file, write_index
from retrograde.checkpoint.ranks import Together
from retrograde.checkpoint.stored import Stored, is_tensor, whole
from retrograde.checkpoint.subject import Saveable, Subject, subject_of
from retrograde.checkpoint.targets import leaf_of, memory_of
from retrograde.errors import CheckpointError
from retrograde.layout import parse_bytes
from retrograde.parameters import ShardedParameter

Sizes = int | str


def export_model(
    path: Path, model: Saveable, file_size: Sizes, dtype: torch.dtype | None, group: dist.ProcessGroup | None
) -> list[Path]:
    ranks = Together(group)
    with ranks.one_fate("rg.export()"):
        limit = parse_bytes(file_size, "export(file_size)")
        subject = subject_of(model, None)
        tensors = _weights(subject)
        path.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:
            forget_index(path)
    mine = [Weight(name, tuple(each.shape), _exported(each.dtype, dtype)) for name, each in tensors.items()]
    runs = _runs(ranks.everybody(mine))
    planned = plan_files(list(runs.values()), limit)
    buffers = subject.names_of_buffers()
    with ranks.one_fate("rg.export()"), torch.no_grad():
        for having, files in zip(runs, planned, strict=True):
            for number, file in enumerate(files):
                if _writer(file, number, having, buffers) == ranks.rank:
                    write_file(path, file, lambda weight: _full(tensors[weight.name]))
        for engine in subject.engines:
            engine.pager.release()
    files = [file for run in planned for file in run]
    with ranks.one_fate("rg.export()"):
        if ranks.rank == 0:
            write_index(path, files)
    return [path / file.name for file in files]


def _writer(file: WeightFile, number: int, having: Sequence[int], buffers: Collection[str]) -> int:
    """The rank that writes a file: ranks take turns, but for buffers, of which each may have its own: the first's."""
    return having[0 if any(weight.name in buffers for weight in file.weights) else number % len(having)]


def _weights(subject: Subject) -> dict[str, torch.Tensor]:
    """Parameters in the order of units, so that each page comes once; then buffers. A tied parameter is there once."""
    shown = {name: leaf_of(value) for name, value in subject.model_state().items() if isinstance(value, torch.Tensor)}
    seen: set[Hashable] = set()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(shown.items(), key=lambda item: _place(item[1])):
        memory = memory_of(tensor)
        if memory not in seen:
            seen.add(memory)
            found[name] = tensor
    return found


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    if isinstance(tensor, ShardedParameter):
        return tensor.unit.index, tensor.place
    return 1 << 62, 0


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedParameter) else tensor


def _exported(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _runs(by_rank: Sequence[Sequence[Weight]]) -> dict[tuple[int, ...], list[Weight]]:
    """Sort weights by the ranks that have them: all ranks, or those of one stage of a pipeline."""
    having: dict[Weight, list[int]] = {}
    for rank, weights in enumerate(by_rank):
        for weight in weights:
            having.setdefault(weight, []).append(rank)
    runs: dict[tuple[int, ...], list[Weight]] = {}
    for weight, ranks in having.items():
        runs.setdefault(tuple(ranks), []).append(weight)
    return runs


def export_checkpoint(path: Path, out: Path, file_size: Sizes, dtype: torch.dtype | None = None) -> list[Path]:
    """Export in one process, without a model, with at most the largest tensor in memory."""
    limit = parse_bytes(file_size, "export(file_size)")
    with open_checkpoint(path) as checkpoint:
        stored = _tensors(checkpoint.model)
        if not stored:
            raise CheckpointError(f"{checkpoint.folder} has no weights in it")
        weights = [Weight(name, tuple(each.shape), _exported(each.dtype, dtype)) for name, each in stored.items()]
        out.mkdir(parents=True, exist_ok=True)
        forget_index(out)
        files = plan_files([weights], limit)[0]
        for file in files:
            write_file(out, file, lambda weight: whole(stored[weight.name]))
    write_index(out, files)
    return [out / file.name for file in files]


def _tensors(model: Mapping[str, object]) -> dict[str, Stored]:
    return {name: each for name, each in model.items() if is_tensor(each)}  # type: ignore[misc]
