"""Communication is counted: by the ledger, and by what really went over the wire."""

from __future__ import annotations

import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import retrograde as rg
from benchmarks.meters import sent_on, tcp_connections
from retrograde.transport.connections import Connections
from retrograde.transport.messages import Message, TcpAddress
from retrograde.transport.one_sided import OneSidedTransport
from retrograde.transport.wires import Sending
from tests.harness import RankPool
from tests.small import BLOCKS, batch, build, loss_of
from tests.stages import ALONE_OR_NOT, EACH_STAGE, EACH_WORLD, WITH_OTHERS
from tests.transport.hosts import group_over_tcp

ENVELOPE = 48  # bytes at most that a message is longer when it is encrypted
HANDSHAKES = 2048  # bytes at most of greetings and heartbeats with another rank
INNER = [f"blocks.{i}" for i in range(BLOCKS)]


def _train(rank: int, world: int, stage: int, backwards: int, options: dict[str, Any]) -> dict[str, Any]:
    """Two warm steps, then one that is counted."""
    model = build()
    if options.pop("freeze", False):
        model.blocks[1].requires_grad_(False)
    engine = rg.shard(model, stage, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        engine.ledger.clear()
        for part in range(backwards):
            loss_of(model, batch(rank, step + part)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ledger = engine.ledger
    names = [unit.name for unit in engine.units]
    counts = {kind: Counter({n: ledger.count(kind, n) for n in names}) for kind in ("gather", "reduce", "join")}
    return counts | {"order": [(e.kind.value, e.unit) for e in ledger.entries if e.kind in ("gather", "reduce")]}


def _clip(rank: int, world: int, stage: int) -> list[list[str]]:
    model = build()
    engine = rg.shard(model, stage)
    met = []
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        loss_of(model, batch(rank)).backward()
        engine.ledger.clear()
        clip(model.parameters(), 0.25)
        met.append([event.unit for event in engine.ledger.entries if event.kind == "agree"])
    return met


@EACH_STAGE
def test_clipping_is_one_meeting(ranks: Callable[[int], RankPool], stage: int) -> None:
    reduced = ["flush"] if stage == 1 else []
    assert ranks(2).run(_clip, stage) == [[[*reduced, "value"]] * 2] * 2


@ALONE_OR_NOT
@pytest.mark.parametrize("backwards", (1, 3))
def test_stage_3(ranks: Callable[[int], RankPool], world: int, backwards: int) -> None:
    for seen in ranks(world).run(_train, 3, backwards, {}):
        expected = dict.fromkeys(INNER, 2 * backwards)
        # Turning around, the pages of the head (root) and of the last block are still there.
        expected[INNER[-1]] = backwards
        expected["(root)"] = 2 * backwards  # at both ends of the forward, not in the backward
        if world == 1:
            expected = dict.fromkeys([*INNER, "(root)"], 1)  # the page is the shard
        assert dict(seen["gather"]) == expected
        assert dict(seen["reduce"]) == dict.fromkeys([*INNER, "(root)"], backwards)
        assert not any(seen["join"].values())


@pytest.mark.parametrize("backwards", (1, 3))
def test_stage_2(ranks: Callable[[int], RankPool], backwards: int) -> None:
    for seen in ranks(2).run(_train, 2, backwards, {}):
        assert dict(seen["gather"]) == dict.fromkeys([*INNER, "(root)"], 1)
        assert dict(seen["reduce"]) == dict.fromkeys([*INNER, "(root)"], backwards)


@pytest.mark.parametrize("backwards", (1, 3))
def test_stage_1(ranks: Callable[[int], RankPool], backwards: int) -> None:
    for seen in ranks(2).run(_train, 1, backwards, {}):
        assert dict(seen["gather"]) == dict.fromkeys([*INNER, "(root)"], 1)
        assert dict(seen["reduce"]) == dict.fromkeys([*INNER, "(root)"], 1)


@EACH_STAGE
def test_frozen_units_are_not_reduced_and_at_stages_1_and_2_not_gathered_again(
    ranks: Callable[[int], RankPool], stage: int
) -> None:
    for seen in ranks(2).run(_train, stage, 1, {"freeze": True}):
        assert seen["reduce"]["blocks.1"] == 0
        assert seen["reduce"]["blocks.0"] == 1
        if stage < 3:
            assert seen["gather"]["blocks.1"] == 0


def _wanted_but_unused(rank: int, world: int, stage: int) -> tuple[list[str], list[str]]:
    """`inputs=` has a parameter that the loss does not depend on: torch runs its unit's node all the same."""
    model = build()
    model.blocks[0].register_parameter("idle", torch.nn.Parameter(torch.ones(3)))
    engine = rg.shard(model, stage)
    wanted = dict(model.named_parameters())
    loss_of(model, batch(rank)).backward(inputs=[wanted["blocks.0.idle"], wanted["blocks.2.up.weight"]])
    grads = engine.full_grads()
    dist.barrier()
    reduced = [event.unit for event in engine.ledger.entries if event.kind in ("reduce", "join")]
    return reduced, [name for name, grad in grads.items() if grad is not None]


@EACH_STAGE
def test_what_has_no_gradient_is_not_reduced(ranks: Callable[[int], RankPool], stage: int) -> None:
    assert ranks(2).run(_wanted_but_unused, stage) == [(["blocks.2"], ["blocks.2.up.weight"])] * 2


def test_a_unit_is_reduced_before_the_next_is_gathered(ranks: Callable[[int], RankPool]) -> None:
    """Without prefetch the order is plain: forward, then each unit's page, then its reduction."""
    forward = ["(root)", *INNER, "(root)"]
    for seen in ranks(2).run(_train, 3, 1, {"prefetch": False}):
        backward: list[tuple[str, str]] = []
        for name in reversed(INNER):
            backward += [("gather", name), ("reduce", name)]
        assert seen["order"] == [("gather", n) for n in forward] + backward + [("reduce", "(root)")]


def test_a_budget_keeps_pages(ranks: Callable[[int], RankPool]) -> None:
    for seen in ranks(2).run(_train, 3, 1, {"resident": "1GiB"}):
        assert dict(seen["gather"]) == dict.fromkeys([*INNER, "(root)"], 1)


def _addresses(engine: rg.Engine) -> set[int]:
    """The ports at which ranks are reached."""
    wires = engine.transport.connections.wires
    contacts = [] if wires is None else [wires.contact, *wires._contacts.values()]
    told = [address for contact in contacts for address in (contact.control, contact.bulk)]
    return {address.port for address in told if isinstance(address, TcpAddress)}


def _kernel_counts(engine: rg.Engine) -> tuple[int, int]:
    """Bytes that the kernel has received from other ranks (tcpi_bytes_received of its struct tcp_info), and sent."""
    received = sent = 0
    ports = _addresses(engine)
    for made in tcp_connections():
        with made:
            if ports & {made.getsockname()[1], made.getpeername()[1]}:
                info = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                received += struct.unpack_from("=Q", info, 128)[0]
                sent += sent_on(made)
    return received, sent


def _counts_at_rest(engine: rg.Engine) -> dict[str, int]:
    """Since the connections were made: what they have counted as sent, and what the kernel has."""
    wires = engine.transport.connections.wires
    counted = 0 if wires is None else wires.sent
    deadline = time.monotonic() + 10
    while (kernel := _kernel_counts(engine))[1] < counted and time.monotonic() < deadline:
        time.sleep(0.01)  # ZeroMQ is about to send
    return {"counted": counted, "kernel received": kernel[0], "kernel sent": kernel[1]}


def _observed(rank: int, world: int, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    sent: list[int] = []  # by two threads: `append` is one operation
    received: list[int] = []
    real_send, real_destination = Connections.send, OneSidedTransport.destination

    def send(self: Connections, dst: int, message: Message, data: Sequence[torch.Tensor] = ()) -> Sending:
        sent.append(sum(tensor.nbytes for tensor in data))
        return real_send(self, dst, message, data=data)

    def destination(self: OneSidedTransport, src: int, message: Message, nbytes: int) -> Sequence[torch.Tensor] | None:
        received.append(nbytes)
        return real_destination(self, src, message, nbytes)

    Connections.send, OneSidedTransport.destination = send, destination  # type: ignore[method-assign]
    try:
        model = build()
        engine = rg.shard(model, stage, process_group=group_over_tcp(), transport="one-sided")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dist.barrier()
        earlier = len(sent)
        received.clear()
        engine.ledger.clear()
        dist.barrier()  # the service thread of a rank answers as soon as another asks
        for step in range(2):
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        counts = _counts_at_rest(engine)
    finally:
        Connections.send, OneSidedTransport.destination = real_send, real_destination  # type: ignore[method-assign]
    seen = {"sent": sum(sent[earlier:]), "received": sum(received), "messages": len(sent), **counts}
    return seen, {kind: engine.ledger.bytes(kind) for kind in ("gather", "reduce")}


@EACH_WORLD
@EACH_STAGE
def test_the_ledger_agrees_with_the_wire(ranks: Callable[[int], RankPool], stage: int, world: int) -> None:
    """Every rank sends its shard to every reader and its buckets' parts to every owner, and nothing else."""
    for seen, ledger in ranks(world).run(_observed, stage):
        assert seen["received"] == ledger["gather"] + ledger["reduce"]
        assert seen["sent"] == ledger["gather"] + ledger["reduce"]
        assert seen["kernel received"] >= seen["received"], "the kernel has seen them too, and the messages themselves"
        assert seen["sent"] <= seen["counted"] <= seen["kernel sent"]
        assert seen["kernel sent"] <= seen["counted"] + seen["messages"] * ENVELOPE + HANDSHAKES * world
        assert ledger["reduce"] > 0 or world == 1


def _wire(rank: int, world: int) -> list[tuple[int, int, int]]:
    model = build()
    engine = rg.shard(model, 3)
    loss_of(model, batch(rank)).backward()
    layouts = {unit.name: unit.layout for unit in engine.units}
    return [(e.bytes, layouts[e.unit].page_bytes, world) for e in engine.ledger.entries if e.kind == "reduce"]


@WITH_OTHERS
def test_a_reduction_sends_each_byte_once(ranks: Callable[[int], RankPool], world: int) -> None:
    for events in ranks(world).run(_wire):
        assert len(events) == BLOCKS + 1
        for nbytes, bucket, n in events:
            assert nbytes * n == bucket * (n - 1)


def _after_a_step(rank: int, world: int, stage: int) -> tuple[list[str], list[str]]:
    """The units whose pages are fetched by a step itself: where nobody holds a weight, and where somebody does."""
    model = build()
    engine = rg.shard(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held: list[torch.Tensor] = []
    fetched = []
    for _ in range(2):
        loss_of(model, batch(rank)).backward()
        engine.ledger.clear()
        optimizer.step()
        fetched.append([entry.unit for entry in engine.ledger.entries if entry.kind == "gather"])
        held.append(model.blocks[1].up.weight)
    dist.barrier()
    return fetched[0], fetched[1]


@EACH_STAGE
@WITH_OTHERS
def test_a_step_fetches_only_what_is_held(ranks: Callable[[int], RankPool], stage: int, world: int) -> None:
    """Whoever holds a weight sees it change; all else is fetched when it is used, while the forward computes."""
    for nobody, somebody in ranks(world).run(_after_a_step, stage):
        assert nobody == [] and somebody == ["blocks.1"]
