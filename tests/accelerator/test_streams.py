"""Streams, events, memory and counters through torch's own interface, and the hazards that must show."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from tests.accelerator import device
from tests.accelerator.device import Tally
from tests.accelerator.ranks import EACH_MODE, alone, each_case
from tests.harness import Ranks

N = 4096


def _main() -> torch.Stream:
    return torch.accelerator.current_stream()


def work_is_queued() -> None:
    with device.use("lazy"):
        x = torch.ones(N, device="late")
        y = x * 2
        assert any("aten::mul" in job for job in device.pending())
        assert y.sum().item() == 2 * N
        assert device.pending() == []


def a_missing_wait_is_a_race_and_reads_nan() -> None:
    with device.use("lazy"):
        side = torch.Stream("late")
        x = torch.ones(N, device="late")
        with side:
            y = x + 1
            assert y.isnan().all().item()
        (race,) = device.races()
        assert "aten::add.Tensor on stream 0:" in race
        assert "that aten::fill_.Scalar on stream 0:0 writes, and nothing orders them" in race


def waits_order() -> None:
    with device.use("lazy"):
        side, event = torch.Stream("late"), torch.Event("late")
        x = torch.ones(N, device="late")
        side.wait_stream(_main())
        with side:
            y = x + 1
            event.record()
        assert not event.query()
        event.wait()
        assert (y * 3).sum().item() == 6 * N
        assert event.query()


def the_host_may_order_too() -> None:
    with device.use("lazy"):
        side, event = torch.Stream("late"), torch.Event("late")
        x = torch.ones(N, device="late")
        event.record()
        event.synchronize()
        with side:
            y = x + 1
        side.synchronize()
        assert (y * 3).sum().item() == 6 * N
        torch.accelerator.synchronize()
        assert device.synchronisations() == {
            "Event.synchronize": 1,
            "Stream.synchronize": 1,
            "item": 1,
            "synchronize": 1,
        }


def _read_by_a_side_stream(record: bool) -> Tensor:
    side = torch.Stream("late")
    x = torch.ones(N, device="late")
    side.wait_stream(_main())
    with side:
        y = x + 1
    if record:
        x.record_stream(side)
    del x
    torch.zeros(8, device="late")  # may get the memory of x
    _main().synchronize()
    side.synchronize()
    return y.cpu()


def memory_freed_too_early_is_scribbled_over() -> None:
    with device.use("lazy"):
        assert (_read_by_a_side_stream(record=True) == 2).all()
        assert device.races() == []
        assert _read_by_a_side_stream(record=False).isnan().all()
        (race,) = device.races()
        assert "reuse of freed memory by aten::" in race


def pinned_memory_is_read_and_written_when_the_copy_runs() -> None:
    with device.use("lazy"):
        x = torch.ones(N, device="late")
        host = torch.zeros(N).pin_memory()
        assert host.is_pinned()
        assert not torch.zeros(N).is_pinned()
        host.copy_(x, non_blocking=True)
        assert host.sum().item() == 0  # too early
        torch.accelerator.synchronize()
        assert host.sum().item() == N
        there = host.to("late", non_blocking=True)
        host.zero_()  # too early
        assert there.sum().item() == 0
        assert "copy to the host" not in device.synchronisations()


def pageable_memory_makes_the_host_wait() -> None:
    with device.use("lazy"):
        host = torch.ones(N)
        x = host.to("late", non_blocking=True)
        host.zero_()  # has been staged
        assert device.synchronisations() == {}
        host.copy_(x, non_blocking=True)
        assert host.sum().item() == N
        assert device.synchronisations() == {"copy to the host": 1}


def pinned_memory_that_is_freed_lives_until_its_copy_has_run() -> None:
    with device.use("lazy"):
        copies = []
        for number in range(8):
            copies.append(torch.full((N,), float(number)).pin_memory().to("late", non_blocking=True))
        assert [x.mean().item() for x in copies] == list(range(8))


def parts_of_a_tensor_do_not_race() -> None:
    with device.use("lazy"):
        side = torch.Stream("late")
        x = torch.zeros(8, 8, device="late")
        side.wait_stream(_main())
        x[:, :4].fill_(1)
        with side:
            x[:, 4:].fill_(2)
            assert device.races() == []
            x[0].fill_(3)
        (race,) = device.races()
        assert race.count("aten::fill_.Scalar") == 2


def copies_are_counted() -> None:
    with device.use("lazy"):
        x = torch.ones(N).to("late")
        torch.empty_like(x).copy_(x)
        torch.cat([x, x])
        x.cpu()
        assert device.copies() == {
            "copy from the host": Tally(1, 4 * N),
            "copy on the device": Tally(1, 4 * N),
            "aten::cat": Tally(1, 8 * N),
            "copy to the host": Tally(1, 4 * N),
        }
        assert device.operators()["aten::cat"] == 1
        device.reset_counters()
        assert device.copies() == device.operators() == device.synchronisations() == {}


def memory_is_counted() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("late")
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(1 << 20, device="late")
    assert torch.accelerator.memory_allocated() - before == 4 << 20
    del x
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 4 << 20


def backward_follows_the_stream_of_the_forward() -> None:
    seen: list[Any] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.extend((torch.accelerator.current_stream(), threading.get_ident()))
            return grad * 2

    with device.use("lazy"):
        side = torch.Stream("late")
        w = torch.ones(N, device="late", requires_grad=True)
        side.wait_stream(_main())
        with side:
            y = Probe.apply(w * 3)
        _main().wait_stream(side)
        y.sum().backward()
        assert seen[0] == side
        assert seen[1] != threading.get_ident()  # devices have threads of their own
        assert w.grad is not None
        assert w.grad.sum().item() == 6 * N


@each_case(
    work_is_queued,
    a_missing_wait_is_a_race_and_reads_nan,
    waits_order,
    the_host_may_order_too,
    memory_freed_too_early_is_scribbled_over,
    pinned_memory_is_read_and_written_when_the_copy_runs,
    pageable_memory_makes_the_host_wait,
    pinned_memory_that_is_freed_lives_until_its_copy_has_run,
    parts_of_a_tensor_do_not_race,
    copies_are_counted,
    memory_is_counted,
    backward_follows_the_stream_of_the_forward,
)
def test_device(late_ranks: Ranks, case: Any) -> None:
    late_ranks(1).run(alone, case)


def _unordered(mode: str, seed: int) -> None:
    """Values may come out right by chance, or be NaN: what is found does not depend on it."""
    with device.use(mode, seed):
        side = torch.Stream("late")
        x = torch.ones(N, device="late")
        with side:
            x.add_(1)
        assert len(device.races()) == 1
        _main().wait_stream(side)


@EACH_MODE
def test_races_are_found_in_every_order(late_ranks: Ranks, mode: str, seed: int) -> None:
    late_ranks(1).run(alone, _unordered, mode, seed)


def _unasked() -> str:
    try:
        with device.use("eager"):
            x = torch.ones(N, device="late")
            with torch.Stream("late"):
                x.add_(1)
    except device.RaceFound as error:
        return str(error)
    return ""


def test_a_race_that_nobody_asked_for_is_an_error(late_ranks: Ranks) -> None:
    (message,) = late_ranks(1).run(alone, _unasked)
    assert "aten::add_.Tensor" in message
    assert "aten::fill_.Scalar" in message
