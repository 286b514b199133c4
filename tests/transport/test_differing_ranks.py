"""Ranks that differ, as threads: meetings of different reasons, reads under way, backwards that were given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.transport import Key, Stamp, ThreadRanks
from retrograde.transport.messages import Read
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.threads import ThreadTransport, _Deferred
from tests import threads
from tests.transport.chains import Stop, chains, sharded, stop


# ---- backwards that were given up
def _gradient(model: nn.Sequential, rank: int, stopping: int | None) -> Tensor:
    hidden = torch.ones(2, 4) * (rank + 1)
    for index, layer in enumerate(model):
        hidden = layer(hidden)
        if index == stopping:
            hidden.register_hook(stop)
    return hidden.sum()


@pytest.mark.parametrize("differ", (False, True))
def test_what_ranks_gave_up_is_not_mixed_with_what_they_send_now(differ: bool) -> None:
    """Rank 1 has sent one unit more when its backward raises: an error, and never half of a sum."""
    models = chains(2)

    def program(ranks: ThreadRanks) -> Tensor | str:
        model = models[ranks.rank]
        sharded(ranks, model, reduce="sum")
        with pytest.raises(Stop):
            _gradient(model, ranks.rank, 1 if differ and ranks.rank else 2).backward()
        try:
            found = torch.autograd.grad(_gradient(model, ranks.rank, None), [model.get_parameter("0.weight")])[0]
        except rg.DivergenceError as error:
            return str(error)
        return found.as_subclass(torch.Tensor).clone()

    got = threads.run(2, program)
    if differ:
        assert all("gave up different parts of backwards before torch.autograd.grad of unit 0" in str(g) for g in got)
        return
    plain = chains(1)[0]
    want = sum(torch.autograd.grad(_gradient(plain, rank, None), [plain[0].weight])[0] for rank in range(2))
    pieces = [each for each in got if isinstance(each, Tensor)]
    assert torch.allclose(torch.cat(pieces).view(4, 4), want)  # type: ignore[arg-type]  # sums of 0 and 1 in any order


# ---- a flush on one rank, an edit on the other
def lazily(self: ThreadTransport, unit: int, name: str, stamp: Stamp, into: dict[int, Tensor]) -> _Deferred:
    """As slow as a read may be: nothing is copied before somebody waits."""
    missing = dict(into)

    def copy() -> bool:
        for src in list(missing):
            found = self._shared.transports[src].shards.shard_for(unit, stamp)
            if not isinstance(found, str):
                missing.pop(src).copy_(found)
        return not missing

    return _Deferred(lambda: self._wait(copy, f"reading unit {name}"), lambda: not missing)


@pytest.mark.parametrize("slowly", (False, True))
def test_a_flush_beside_an_edit(monkeypatch: pytest.MonkeyPatch, slowly: bool) -> None:
    """Rank 1 has gradients that wait, and reads `.grad`; rank 0 has none and goes on to its edit, then to a read.

    A page that was expected is under way on both."""
    if slowly:
        monkeypatch.setattr(ThreadTransport, "read", lazily)
    models = chains(2)

    def program(ranks: ThreadRanks) -> bool:
        model = models[ranks.rank]
        engine = sharded(ranks, model)
        optimizer = torch.optim.SGD(model.parameters(), 0.125)
        x = torch.ones(2, 4)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if ranks.rank == 1:
            with engine.no_sync():
                model(x).sum().backward()
        with torch.no_grad():
            model[0](x)
        assert any(unit.page.loading for unit in engine.units)
        if ranks.rank == 0:
            time.sleep(0.2)
        assert model.get_parameter("0.weight").grad is not None or ranks.rank == 0
        with torch.no_grad():
            model.get_parameter("2.weight").clamp_(-0.25, 0.25)
        model(x).sum().backward()
        optimizer.step()
        return True

    assert threads.run(2, program) == [True, True]


def test_a_hook_that_reads_while_edits_are_looked_for() -> None:
    """An edit that nobody reported is found before a step: a fence, at which another rank's gradient comes, whose hook
    pages in."""
    models = chains(2)

    def program(ranks: ThreadRanks) -> bool:
        model = models[ranks.rank]
        sharded(ranks, model, resident="1GiB")
        optimizer = torch.optim.SGD(model.parameters(), 0.125)
        seen: list[Tensor] = []
        if ranks.rank == 0:
            leaf = model.get_parameter("0.weight")
            leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(model[3].weight.sum()))
        else:
            model(torch.ones(2, 4)).sum().backward()
        held = [model[0].weight, model[1].weight]
        with torch.no_grad():
            torch._foreach_mul_([held[0].detach()], 0.5)
        optimizer.step()
        return bool(seen) == (ranks.rank == 0)

    assert threads.run(2, program) == [True, True]


# ---- a shard that changes while somebody asks for it
class _Connections:
    rank, world, peers = 0, 2, (1,)

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.told: list[Any] = []

    def attach(self, receiver: OneSidedTransport) -> None:
        receiver.number = 0

    def tell(self, dst: int, message: Any, data: Any = ()) -> None:
        self.told.append(message)


class _Stepping:
    """The main thread ends its step just when the service thread has looked."""

    def __init__(self) -> None:
        self.at_rest: Callable[[], None] | None = None

    def shard_numel(self, unit: int) -> int:
        return 1

    def shard_for(self, unit: int, stamp: Stamp) -> Tensor | str:
        if self.at_rest is None:
            return torch.zeros(1)
        end, self.at_rest = self.at_rest, None
        end()
        return "it has not finished the step"


def test_a_reader_that_asks_while_a_step_ends_is_answered() -> None:
    connections, shards = _Connections(), _Stepping()
    transport = OneSidedTransport(connections, shards, 1.0)  # type: ignore[arg-type]
    main: list[threading.Thread] = []

    def end_step() -> None:
        main.append(threading.Thread(target=transport.shards_changed))
        main[0].start()
        time.sleep(0.05)  # it has come to where it looks for readers

    shards.at_rest = end_step
    with connections.changed:
        transport.on_message(1, Read(0, 0, Stamp(0, 0, 0)), ())
    main[0].join(5.0)
    assert len(connections.told) == 1 and transport._requests == []


def test_keys_that_differ_in_the_attempt_alone() -> None:
    key = Key(1, 2, 0, 4)
    assert key.same_but_for_attempt(Key(1, 2, 3, 4))
    assert not any(key.same_but_for_attempt(other) for other in (Key(0, 2, 0, 4), Key(1, 1, 0, 4), Key(1, 2, 0, 2)))
