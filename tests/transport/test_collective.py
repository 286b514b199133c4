"""Pages and gradients by collectives of torch.distributed: exact and counted. Ranks that stray: test_strays.py."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import retrograde as rg
from retrograde.transport.collective.communicator import Communicator, Offer
from retrograde.transport.connections import Connections
from retrograde.transport.messages import Message
from tests.harness import Ranks
from tests.multiproc.twin import Twin
from tests.patterns.cells import LIMIT
from tests.patterns.driver import play_rank
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import differences
from tests.reference import play
from tests.small import BLOCKS, batch, build, loss_of
from tests.stages import EACH_STAGE, OPPOSITE_STAGES, WITH_OTHERS
from tests.transport.hosts import group_over_tcp

UNITS = BLOCKS + 1  # and the root
# Rows in which all ranks do the same: of each kind of backward one.
ROWS = (
    "1-plain-lstm",
    "3-two_losses-mlp",
    "6-window-mlp",
    "9-tiled_loss-mlp",
    "14-penalise_parameters-mlp",
    "18-backward_raises-mlp",
    "24c-edited_full-mlp",
    "25b-_wasserstein_phase-gan",
)


@pytest.mark.parametrize("case_id", ROWS)
@OPPOSITE_STAGES
def test_rows(ranks: Ranks, case_id: str, stage: int) -> None:
    got = ranks(2).run(play_rank, case_id, stage, timeout=LIMIT, transport="collective")
    want = expected(case_id, 2, stage)
    for rank in range(2):
        assert differences(got[rank], want[rank], CASES[case_id].rtol) == []


# ---- who goes by collectives
def _ways(rank: int, world: int, transport: str) -> list[str]:
    """The kinds of transport within a host, and between hosts, after a step that was exact."""
    kinds = []
    for group in (None, group_over_tcp()):
        twin = Twin(rank, world, 3, process_group=group, transport=transport)
        twin.optimize()
        twin.backward(0)
        twin.step()
        twin.check()
        kinds.append(type(twin.engine.transport).__name__)
    return kinds


WAYS = {
    "auto": ["MappedTransport", "CollectiveTransport"],
    "one-sided": ["MappedTransport", "OneSidedTransport"],
    "collective": ["CollectiveTransport", "CollectiveTransport"],
}


@pytest.mark.parametrize("transport", WAYS)
def test_ranks_of_several_hosts_go_by_collectives(ranks: Ranks, transport: str) -> None:
    assert ranks(2).run(_ways, transport) == [WAYS[transport]] * 2


# ---- counts
def _plain(engine: rg.Engine, rank: int, step: int) -> None:
    loss_of(engine.model, batch(rank, step)).backward()


def _clipped(engine: rg.Engine, rank: int, step: int) -> None:
    _plain(engine, rank, step)
    torch.nn.utils.clip_grad_norm_(engine.model.parameters(), 1.0)


def _in_a_window(engine: rg.Engine, rank: int, step: int) -> None:
    with engine.coalesce():
        _plain(engine, rank, step)
        _plain(engine, rank, step + 10)


def _counted(
    rank: int, world: int, stage: int, gradients: Callable[[rg.Engine, int, int], None]
) -> tuple[dict[str, int], dict[str, int]]:
    """The last of some steps: calls of collectives, and messages that this rank sent."""
    calls: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    start, send = Communicator.start, Connections.send

    def starting(self: Communicator, offer: Offer) -> dist.Work:
        calls[type(offer).__name__] += 1
        return start(self, offer)

    def sending(self: Connections, dst: int, message: Message, data: list[torch.Tensor] = ()) -> object:  # type: ignore[assignment]
        messages[type(message).__name__] += 1
        return send(self, dst, message, data)

    model = build()
    engine = rg.shard(model, stage, transport="collective")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.object(Communicator, "start", starting), mock.patch.object(Connections, "send", sending):
        for step in range(4):
            dist.barrier()  # what a rank that is ahead says belongs to its own step
            calls.clear()
            messages.clear()
            gradients(engine, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
    return dict(calls), dict(messages)


@WITH_OTHERS
@EACH_STAGE
def test_a_step_that_was_foreseen(ranks: Ranks, world: int, stage: int) -> None:
    """Gathers, reductions, and the 2 (N - 1) messages of the step's agreement: nothing else. At stage 3 all but the
    last unit of the forward are gathered again in backward."""
    again = UNITS - 1 if stage == 3 else 0
    for rank, (calls, messages) in enumerate(ranks(world).run(_counted, stage, _plain)):
        assert calls == {"GatherOffer": UNITS + again, "ExchangeOffer": UNITS}
        assert messages == {"Ordered": world - 1 if rank == 0 else 1}


@EACH_STAGE
def test_a_window_that_was_foreseen(ranks: Ranks, stage: int) -> None:
    """Its end is no meeting either."""
    gathers = 2 * (UNITS + UNITS - 1) if stage == 3 else UNITS
    for calls, messages in ranks(2).run(_counted, stage, _in_a_window):
        assert calls == {"GatherOffer": gathers, "ExchangeOffer": UNITS}
        assert messages == {"Ordered": 1}


@EACH_STAGE
def test_clipping_is_one_meeting_more(ranks: Ranks, stage: int) -> None:
    for _, messages in ranks(2).run(_counted, stage, _clipped):
        assert messages == {"Ordered": 2, "Meet": 1}


# ---- large shards in the host's memory
WIDE = 512  # of 512 x 512 numbers each of four ranks has 256 KiB


def _wide() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 2))


def _wide_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(3, WIDE, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def _large_shards(rank: int, world: int, stage: int) -> tuple[int, int, list[str]]:
    """Broadcasts and all-gathers of two steps, and what differs from plain torch after them."""
    model, plain = _wide(), _wide()
    rg.shard(model, stage, units=nn.Linear, transport="collective")
    optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    with (
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcasts,
        mock.patch.object(dist, "all_gather_single", wraps=dist.all_gather_single) as gathers,
    ):
        for step in range(2):
            _wide_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(2):
        play(plain, world, lambda model, rank, step=step: _wide_loss(model, rank, step).backward(), stage)
        reference.step()
        reference.zero_grad()
    whole = model.state_dict()
    wrong = [name for name, value in plain.state_dict().items() if not torch.equal(whole[name], value)]
    return broadcasts.call_count, gathers.call_count, wrong


@WITH_OTHERS
@OPPOSITE_STAGES
def test_large_shards_go_straight_to_their_places(ranks: Ranks, world: int, stage: int) -> None:
    """Of two of the three units, in each of two steps. Of the first no backward reads the weight; at stage 3 the
    pages of the others are the two that stay."""
    for broadcasts, gathers, wrong in ranks(world).run(_large_shards, stage):
        assert wrong == []
        assert broadcasts == 2 * 2 * world
        assert gathers == 2


# ---- a profiler
def _profiled(rank: int, world: int) -> tuple[int, bool]:
    """Steps under torch's profiler, which has the backend's threads call back into Python: how many were done, and
    whether calls were seen."""
    model = build()
    rg.shard(model, 3, timeout=20.0, transport="collective")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = False
    for step in range(60):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen = seen or any(event.name.startswith("c10d::") for event in profiled.events())
    return step + 1, seen


def test_steps_under_a_profiler(ranks: Ranks) -> None:
    """A look at a call must not wait for the backend with the lock of the interpreter held: some steps hung."""
    assert ranks(2).run(_profiled) == [(60, True)] * 2


# ---- arguments
def _refused(rank: int, world: int) -> list[str]:
    found = []
    for options in ({"transport": "carrier pigeon"}, {"transport": "collective" if rank else "one-sided"}):
        with pytest.raises(rg.ShardingError) as caught:
            rg.shard(build(), timeout=20.0, **options)
        found.append(str(caught.value))
    return found


def test_wrong_transports(ranks: Ranks) -> None:
    for unknown, differing in ranks(2).run(_refused):
        assert "transport='carrier pigeon'" in unknown
        assert "transport='one-sided' on rank 0, transport='collective' on rank 1" in differing


# ---- groups that are used again
class _Groups:
    """How many process groups were made meanwhile."""

    def __init__(self) -> None:
        self.made = 0
        self._make = dist.new_group

    def __call__(self, *args: object, **options: object) -> object:
        self.made += 1
        return self._make(*args, **options)


def _one_after_the_other(rank: int, world: int, keeps: bool) -> tuple[int, list[str]]:
    """Four engines over collectives, two that got there by `exact=False`. `keeps`: rank 0 keeps all of them."""
    kept: list[object] = []
    wrong = []
    with mock.patch.object(dist, "new_group", _Groups()) as groups:
        for number in range(6):
            how = {"transport": "collective"} if number < 4 else {"exact": False}
            model = build()
            plain = build()
            engine = rg.shard(model, 3, timeout=23.0 + keeps, **how)  # groups of other time-outs are others
            loss_of(model, batch(rank, number)).backward()
            play(plain, world, lambda model, rank, step=number: loss_of(model, batch(rank, step)).backward(), 3)
            for name, param in plain.named_parameters():
                if not torch.allclose(engine.full_grad(name), param.grad, rtol=1e-4, atol=1e-6):
                    wrong.append(f"engine {number}: {name}")
            kept.extend([model, engine] if keeps and rank == 0 else [])
            dist.barrier()  # a rank that drops its model takes its shards along
            del model, engine
            gc.collect()
    return groups.made, wrong


@pytest.mark.parametrize(("keeps", "made"), ((False, 1), (True, 6)))
def test_an_engine_takes_the_group_of_one_that_is_gone(ranks: Ranks, keeps: bool, made: int) -> None:
    """On all ranks: what one of them still has is in use."""
    assert ranks(2).run(_one_after_the_other, keeps) == [(made, [])] * 2


def _given_up(rank: int, world: int) -> int:
    """Of the first engine a call is under way when it goes: nobody takes its group."""
    with mock.patch.object(dist, "new_group", _Groups()) as groups:
        for number in range(3):
            model = build()
            engine = rg.shard(model, 3, timeout=29.0, transport="collective")
            loss_of(model, batch(rank, number)).backward()
            dist.barrier()
            if number == 0:
                engine.transport._communicator._owners.calls.begin()  # type: ignore[union-attr]
            del model, engine
            gc.collect()
    return groups.made


def test_a_group_with_calls_under_way_is_not_used_again(ranks: Ranks) -> None:
    assert ranks(2).run(_given_up) == [2, 2]
