"""Connects a rank of a pipeline to the pipeline's other ranks and, with ZeRO, to its replicas."""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from retrograde.arguments import seconds
from retrograde.devices import HOST, streams_of
from retrograde.errors import PipelineError
from retrograde.pipeline.options import RanksOfPipeline, Zero, group_of
from retrograde.transport import PipelineRanks, ProcessRanks, ShardServer, Transport

PATIENCE = 1800.0  # seconds; it is long since another rank may compile in its first step


class Circle(NamedTuple):
    """Ranks that meet: those of the pipeline, or the replicas of this rank. `in_job`: their ranks in the job."""

    transport: Transport
    in_job: Sequence[int]


class Connected(NamedTuple):
    """This rank's ways to the others of a pipeline."""

    own: PipelineRanks
    circles: list[Circle]  # first the pipeline's, then that of the replicas


def patience_of(timeout: float) -> float:
    """How long to wait for other ranks. If `timeout` is wrong, the default: this rank connects, to tell the others."""
    try:
        return seconds("timeout", timeout, PipelineError)
    except PipelineError:
        return PATIENCE


def connect(mesh: RanksOfPipeline, zero: Zero | None, parameters: ShardServer, patience: float) -> Connected:
    """Connect this rank. `parameters` serves the tied parameters to other ranks."""
    host = streams_of(HOST)  # meetings exchange values in the host's memory
    if isinstance(mesh, PipelineRanks):
        if zero is not None:
            raise PipelineError(
                "zero=... needs ranks that are processes; give mesh=... a DeviceMesh or a group of them"
            )
        return Connected(mesh, [Circle(mesh.transport(parameters, host, patience), range(mesh.world))])
    groups = [group_of("mesh", mesh, "pp")]
    if isinstance(zero, Zero):
        groups.append(group_of("zero.mesh", zero.mesh, "dp"))
    ranks = [ProcessRanks(group, patience) for group in groups]
    transports = [each.transport(parameters, host, patience) for each in ranks]
    return Connected(ranks[0], list(map(Circle, transports, map(dist.get_process_group_ranks, groups))))
