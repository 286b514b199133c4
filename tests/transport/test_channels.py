"""Messages between stages of a pipeline, over both kinds of channels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
from retrograde.devices import Stream, streams_of
from retrograde.pipeline.payload import layout_of
from retrograde.transport import Parts, PipelineRanks, ProcessRanks, ThreadRanks
from retrograde.transport.channel import Layouts
from retrograde.transport.messages import Address, Constant, Form, TreeForm, TreeLeaf
from tests import threads
from tests.harness import RankPool

HOST = streams_of(torch.device("cpu"))
OUTPUT, GRADIENT = Address(True, 0, 0), Address(False, 0, 0)


def _content(*tensors: torch.Tensor | None) -> Parts:
    return Parts(Form(tuple(None if each is None else layout_of(each) for each in tensors), None), list(tensors))


def test_a_layout_is_news_once() -> None:
    layouts = Layouts()

    def form(constant: Constant) -> Form:
        return Form((layout_of(torch.ones(2)),), TreeForm(TreeLeaf(), [constant]))

    first = form(1)
    assert layouts.news(OUTPUT, first) is first
    assert layouts.news(OUTPUT, first) is None, "the same"
    assert layouts.news(OUTPUT, form(1)) is None, "an equal one"
    for other in (form(True), form(1.0), first):
        assert layouts.news(OUTPUT, other) is other, "1, 1.0 and True are not the same"
    layouts.not_sent(OUTPUT)
    assert layouts.news(OUTPUT, first) is first
    assert layouts.news(GRADIENT, first) is first, "of another address"


def _talk(ranks: PipelineRanks, all_are_there: Callable[[], object]) -> list[object]:
    """Rank 0 sends two messages to one address, before anybody asks for them; rank 1 answers, and then fails."""
    channel = ranks.channel(HOST, 10.0, ())
    all_are_there()  # as `Pipeline()` sees to it
    transposed = torch.arange(6.0).view(2, 3).t()
    if ranks.rank == 0:
        for factor in (1, 2):
            channel.send(1, OUTPUT, _content(factor * transposed, None))
        transposed.zero_()
        first = channel.receive(1, GRADIENT).wait(Stream())
        second = channel.receive(1, GRADIENT).wait(Stream())
        assert first is not None
        return [first.tensors[0], second]
    got = [channel.receive(0, OUTPUT).wait(Stream()) for _ in range(2)]
    channel.send(0, GRADIENT, _content(torch.ones(3, dtype=torch.int64)))
    channel.send_void(0, GRADIENT)
    return [part for each in got if each is not None for part in each.tensors]


def _check(by_rank: list[list[object]]) -> None:
    (answer, void), (first, none, second, _) = by_rank
    want = torch.arange(6.0).view(2, 3).t()
    assert isinstance(first, torch.Tensor) and torch.equal(first, want) and first.stride() == want.stride()
    assert isinstance(second, torch.Tensor) and torch.equal(second, 2 * want) and none is None
    assert isinstance(answer, torch.Tensor) and answer.tolist() == [1, 1, 1] and void is None


def _by_processes(rank: int, world: int) -> list[object]:
    assert dist.group.WORLD is not None
    found = _talk(ProcessRanks(dist.group.WORLD), dist.barrier)
    dist.barrier()
    return found


def test_processes(ranks: Callable[[int], RankPool]) -> None:
    _check(ranks(2).run(_by_processes))


def test_threads() -> None:
    _check(threads.run(2, lambda ranks: _talk(ranks, lambda: None)))


def test_what_never_comes_is_told() -> None:
    def program(ranks: ThreadRanks) -> str:
        with pytest.raises(rg.PipelineError) as caught:
            ranks.channel(HOST, 0.1, ()).receive(1, OUTPUT).wait(Stream())
        return str(caught.value)

    assert threads.run(1, program) == ["rank 0 waits for the output of stage 0, microbatch 0: nothing came in 0.1 s"]
