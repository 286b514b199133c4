"""To whom a rank of a pipeline is connected: the ranks of the pipeline and, with ZeRO, this rank's replicas."""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from retrograde.arguments import seconds
from retrograde.devices import HOST, streams_of
from retrograde.errors import PipelineError
from retrograde.pipeline.options import RanksOfPipeline, Zero, group_of
from retrograde.transport import PipelineRanks, ProcessRanks, ShardServer, Transport

PATIENCE = 1800.0  # seconds: another rank's first step may compile


class Circle(NamedTuple):
    """Ranks that meet: those of the pipeline, or the replicas of this rank. `in_job`: their numbers there."""

    transport: Transport
    in_job: Sequence[int]


class Connected(NamedTuple):
    """This rank's ways to the others of a pipeline."""

    own: PipelineRanks
    circles: list[Circle]  # the pipeline's first


def patience_of(timeout: float) -> float:
    """For how long to wait for other ranks. One with a mistake in `timeout` connects too, to tell them."""
    try:
        return seconds("timeout", timeout, PipelineError)
    except PipelineError:
        return PATIENCE


def connect(mesh: RanksOfPipeline, zero: Zero | None, parameters: ShardServer, patience: float) -> Connected:
    """`parameters`: those that stages of several ranks use."""
    host = streams_of(HOST)  # what ranks say at meetings is the host's
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
