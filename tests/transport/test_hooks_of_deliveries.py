"""Hooks that run in deliveries of gradients that waited: what they may read, and what is left when one raises."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrograde.parameters.sharded_tensor import ShardedTensor
from retrograde.transport import ThreadRanks
from tests import threads
from tests.transport.chains import BLOCKS, Stop, chains, sharded, stop


@pytest.mark.parametrize("hooked", ((), (1,), (0, 1)))
def test_a_hook_reads_weights_at_the_step(hooked: tuple[int, ...]) -> None:
    """Rank 1 is slow in it: rank 0 must not write its weights before. Without hooks the step is one meeting."""
    models = chains(2)

    def program(ranks: ThreadRanks) -> tuple[Tensor, list[str]]:
        model = models[ranks.rank]
        engine = sharded(ranks, model, timeout=5.0)

        def read(param: Tensor) -> None:
            time.sleep(0.3 * ranks.rank)
            seen.append(model[0].weight.detach().clone())

        seen = [torch.zeros(())]
        if ranks.rank in hooked:
            model.get_parameter(f"{BLOCKS - 1}.weight").register_post_accumulate_grad_hook(read)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with engine.no_sync():
            model(torch.ones(2, 4)).sum().backward()
        engine.ledger.clear()
        optimizer.step()
        return seen[-1], [event.unit for event in engine.ledger.entries if event.kind == "agree"]

    before = chains(1)[0][0].weight.detach()
    for rank, (seen, met) in enumerate(threads.run(2, program)):
        assert met == (["step", "step"] if hooked else ["step"])
        assert rank not in hooked or torch.equal(seen, before)


@pytest.mark.parametrize("raises", ((0, 1), (1,)))
@pytest.mark.parametrize("place", range(BLOCKS))
def test_a_hook_that_raises_leaves_the_other_gradients(place: int, raises: tuple[int, ...]) -> None:
    """At the end of a window: all units but its own have their gradients, and the next window is as any other."""
    models = chains(3)
    plain = models.pop()
    plain(torch.ones(2, 4)).sum().backward()

    def program(ranks: ThreadRanks) -> list[tuple[Tensor | None, Tensor | None]]:
        model = models[ranks.rank]
        engine = sharded(ranks, model, timeout=5.0)
        handle = model.get_parameter(f"{place}.weight").register_post_accumulate_grad_hook(stop)
        if ranks.rank in raises:
            with pytest.raises(Stop), engine.coalesce():
                model(torch.ones(2, 4)).sum().backward()
        handle.remove()
        if ranks.rank not in raises:
            with engine.coalesce():
                model(torch.ones(2, 4)).sum().backward()
        first = engine.full_grads()
        model.zero_grad()
        with engine.coalesce():
            model(torch.ones(2, 4)).sum().backward()
        again = engine.full_grads()
        assert not engine._strategy._sums and not engine._strategy._waiting  # type: ignore[attr-defined]
        return [(first[name], again[name]) for name in first]

    for grads in threads.run(2, program):
        for (first, again), param in zip(grads, plain.parameters(), strict=True):
            assert first is not None and torch.equal(first, param.grad)  # type: ignore[arg-type]
            assert again is not None and torch.equal(again, param.grad)  # type: ignore[arg-type]


def _counting(param: Tensor, name: str, how: str, ran: list[str], raises: bool) -> None:
    def hook(grad: Tensor) -> None:
        ran.append(name)
        if raises:
            raise Stop(name)

    if how == "before":
        param.register_hook(hook)
    else:
        param.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("how", ("before", "after"))
@pytest.mark.parametrize("places", ((0,), (1,), (3,), (1, 2)))
def test_a_hook_that_raises_leaves_the_gradients_of_its_unit(places: tuple[int, ...], how: str) -> None:
    """All parameters are of one unit. Each hook runs once, the first error is raised, and only a tensor hook keeps the
    gradient of its own parameter from coming, as in torch."""
    models, hooked = chains(3), sorted({0, 2, *places})
    plain = models.pop()
    plain(torch.ones(2, 4)).sum().backward()

    def program(ranks: ThreadRanks) -> tuple[list[str], dict[str, Tensor | None]]:
        model = models[ranks.rank]
        engine = sharded(ranks, model, units=[nn.Sequential], timeout=5.0)
        ran: list[str] = []
        for place in hooked:
            _counting(model.get_parameter(f"{place}.weight"), str(place), how, ran, place in places)
        with pytest.raises(Stop) as raised, engine.coalesce():
            model(torch.ones(2, 4)).sum().backward()
        assert str(raised.value) == next(each for each in ran if int(each) in places)
        return sorted(ran), engine.full_grads()

    for ran, grads in threads.run(2, program):
        assert ran == list(map(str, hooked))
        for place, param in enumerate(plain.parameters()):
            grad = grads[f"{place}.weight"]
            if how == "before" and place in places:
                assert grad is None
            else:
                assert grad is not None and torch.equal(grad, param.grad)  # type: ignore[arg-type]


def test_a_step_asks_no_parameter_for_its_hooks_by_a_function_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question that reaches the class of a parameter costs microseconds, and there may be thousands of both."""
    asked: list[str] = []
    (model,) = chains(1)

    def program(ranks: ThreadRanks) -> None:
        sharded(ranks, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        serve = ShardedTensor.__torch_function__

        def counted(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(str(func))
            return serve(func, types, args, kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(ShardedTensor, "__torch_function__", classmethod(counted))
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert model.get_parameter("0.weight").grad.abs().sum() > 0

    threads.run(1, program)
    assert asked == []


@pytest.mark.parametrize("before", (True, False), ids=("before shard()", "after"))
def test_a_hook_after_accumulation_returns_nothing(before: bool) -> None:
    """torch says so of one that does; `lambda p: p.grad.mul_(2)` is one."""
    (model,) = chains(1)
    param = model.get_parameter("0.weight")

    def program(ranks: ThreadRanks) -> str:
        if before:
            param.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))
        sharded(ranks, model)
        if not before:
            param.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))
        with pytest.raises(RuntimeError) as raised:
            model(torch.ones(2, 4)).sum().backward()
        return str(raised.value)

    (said,) = threads.run(1, program)
    assert "post accumulate grad hooks should return None" in said
