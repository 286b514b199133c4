"""The options of a pipeline: how it is cut and sharded, and over which ranks."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from retrograde.arguments import Said, instance, not_negative, one_of, said, sequence, shown, whole_number, wrong
from retrograde.errors import PipelineError, RetrogradeError, ShardingError
from retrograde.layout import Precision, Units, check_reduce, check_stage, check_units, parse_bytes
from retrograde.pipeline.generators import GENERATORS
from retrograde.pipeline.schedule import Schedule
from retrograde.transport import PipelineRanks
from retrograde.transport.groups import GroupOfRanks, process_group_of


@dataclass(frozen=True)
class Zero:
    """How a pipeline's stages are sharded over the data-parallel ranks; see `rg.shard`.

    `gathered`: how many of its stages a rank keeps in memory, whole, from their first use to the last (at stage 3). By
    default a page comes and goes with each use, which takes the least memory and the most gathers. `precision`: inputs
    and keyword arguments of a step are cast as a model's are, results of the last stage too. Microbatches are added up
    in `precision.accumulate`, as every window is.
    """

    stage: int = 3
    mesh: GroupOfRanks = None
    units: Units = "auto"
    reduce: str = "mean"
    resident: int | str = 0
    gathered: int | None = None
    precision: Precision | str | None = None

    def __post_init__(self) -> None:
        check_stage(self.stage)
        check_ranks("zero.mesh", self.mesh, ShardingError)
        check_units(self.units)
        check_reduce(self.reduce)
        parse_bytes(self.resident, "resident")
        Precision.of(self.precision)
        if self.gathered is not None:
            whole_number("gathered", self.gathered, 1, "a number of stages, 1 or more, or None")


class Microbatches(tuple[Any, ...]):
    """Data that is already in microbatches, where cutting tensors along their first dimension is not right."""

    def __new__(cls, parts: Iterable[Any] = ()) -> "Microbatches":
        if isinstance(parts, str | bytes | Mapping) or not isinstance(parts, Iterable):
            raise PipelineError(
                f"Microbatches({shown(parts)}) is not in parts; give a list with the data of each microbatch"
            )
        return super().__new__(cls, parts)


@dataclass(frozen=True)
class Cut:
    """How the model is cut: before the blocks named in `at`, or balanced by `costs` of the blocks, or by the time that
    the first rank measures for the inputs in `sample`, or by parameters."""

    at: Sequence[str] | None = None
    costs: Sequence[float] | None = None
    sample: tuple[Any, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments that go with the sample

    def __post_init__(self) -> None:
        given = [name for name in ("at", "costs", "sample") if getattr(self, name) is not None]
        if len(given) > 1:
            names = " and ".join(f"cut.{name}" for name in given)
            raise PipelineError(f"{names} are different ways to cut; give one of them")
        if self.at is not None:
            self._check_names(self.at)
        if self.costs is not None:
            self._check_costs(self.costs)
        if self.sample is not None:
            fix = "a tuple with the arguments of the first block, as sample=(x,)"
            instance("cut.sample", self.sample, tuple, "is not a tuple", fix, PipelineError)
        instance("cut.options", self.options, Mapping, "is not a dictionary", "a dictionary", PipelineError)

    @staticmethod
    def _check_names(at: Any) -> None:
        fix = "a list of names of blocks"
        for name in sequence("cut.at", at, fix, PipelineError):
            if not isinstance(name, str):
                raise wrong("cut.at", at, f"has {shown(name)}, which is not a name", fix, PipelineError)

    @staticmethod
    def _check_costs(costs: Any) -> None:
        fix = "a number, 0 or more, for each block"
        for cost in sequence("cut.costs", costs, fix, PipelineError):
            try:
                not_negative("cost", cost, fix, PipelineError)
            except PipelineError as error:
                raise wrong("cut.costs", costs, f"has {shown(cost)}", fix, PipelineError) from error


RanksOfPipeline = GroupOfRanks | PipelineRanks


def check_ranks(name: str, mesh: Any, error: type[RetrogradeError] = PipelineError) -> None:
    if mesh is not None:
        fix = "a DeviceMesh of one dimension or a group of torch.distributed"
        instance(name, mesh, (DeviceMesh, dist.ProcessGroup), "is not a mesh", fix, error)


def group_of(name: str, mesh: GroupOfRanks, dimension: str) -> dist.ProcessGroup:
    """The process group of a mesh or group, by default of all ranks. An error suggests `dimension` of the mesh."""
    check_ranks(name, mesh)
    return process_group_of(mesh, name, f"mesh['{dimension}']", PipelineError)


def check_apart(zero: Zero, stages: Iterable[int], replicas: Iterable[int]) -> None:
    """Raise if a rank of this pipeline is also given as a replica of this one, since it holds other stages."""
    others = sorted(set(stages) & set(replicas) - {dist.get_rank()})
    if others:
        raise wrong(
            "zero.mesh",
            zero.mesh,
            f"has rank {others[0]}, which is in this pipeline and holds other stages",
            'the other dimension, as mesh["dp"]',
            PipelineError,
        )


def checked_reduction(given: Any) -> str:
    return one_of("loss_reduction", given, ("mean", "sum"), '"mean" or "sum"', PipelineError)


def named_schedule(schedule: Any) -> str | Schedule:
    if not isinstance(schedule, str | Schedule):
        names = ", ".join(GENERATORS)
        raise wrong("schedule", schedule, "is not known", f"one of {names}, 'auto' or a Schedule", PipelineError)
    return schedule


def arguments_to_compare(given: str | Schedule, schedule: Schedule, zero: Zero | None, cut: Cut | None) -> list[Said]:
    """The arguments that must be the same on every rank. The lists of the schedule are compared by a checksum."""
    lists = zlib.crc32(str(schedule).encode())
    name = given if isinstance(given, str) else f"{schedule.name} (checksum {lists})"
    sharded = None
    if zero is not None:
        sharded = (int(zero.stage), zero.reduce, zero.gathered, Precision.of(zero.precision).meaning)
    return [
        said("microbatches", schedule.microbatches, schedule.microbatches),
        said("schedule", name, (schedule.name, lists)),
        said("zero", zero, sharded),
        said("cut", cut, cut is not None and cut.sample is not None),
    ]
