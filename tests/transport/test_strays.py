"""Ranks that stray from the order of collectives: exact values, messages counted, and nothing hangs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import retrograde as rg
from retrograde.gradients.keys import Keys
from retrograde.gradients.offers import due_offers, end_of_backward
from retrograde.transport import Key, Position, Reason, Use
from retrograde.transport.collective.courtesy import is_absent, present_parts
from tests.harness import Ranks
from tests.multiproc.twin import Twin
from tests.patterns.cells import LIMIT
from tests.patterns.driver import play_rank
from tests.patterns.oracle import expected
from tests.patterns.rows import CASES
from tests.patterns.trace import differences
from tests.small import BLOCKS, backward_that_raises, batch, build, loss_of
from tests.stages import STAGES_WITH_OTHERS
from tests.transport.strays import (
    ORDERS,
    STEPS,
    STRAY_AT,
    STRAYS,
    Counted,
    counting,
    counts_of,
    seen_by_a_hook,
    through,
)

# A row of each kind of divergence.
ROWS = (
    "11b-parameter_on_first_rank-mlp",
    "11b-unit_on_first_rank_retained-mlp",
    "11c-changing_units-mlp",
    "11d-other_order-mlp",
    "11e-unequal_backwards_then_edit-mlp",
    "11e-work_on_first_rank-mlp",
    "11f-replicated_changing_units-mlp",
)


@pytest.mark.parametrize("case_id", ROWS)
@STAGES_WITH_OTHERS
def test_rows(ranks: Ranks, world: int, case_id: str, stage: int) -> None:
    got = ranks(world).run(play_rank, case_id, stage, timeout=LIMIT, transport="collective")
    want = expected(case_id, world, stage)
    for rank in range(world):
        assert differences(got[rank], want[rank], CASES[case_id].rtol) == []


# ---- absent parts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_what_is_absent_is_told_from_zeros_and_from_nans(dtype: torch.dtype) -> None:
    absent = torch.empty(3, dtype=dtype)
    absent.view(torch.uint8).fill_(255)
    rows = [torch.zeros(3, dtype=dtype), absent, torch.full((3,), torch.nan, dtype=dtype), absent.clone()]
    rows[3][2] = 1  # one element of it says something
    assert [is_absent(row) for row in rows] == [False, True, False, False]
    assert list(present_parts(torch.cat(rows), 4)) == [0, 2, 3]


# ---- which gradients go together
def _at(reason: Reason, sent: Sequence[Key], ended: int | None = None, needed: Sequence[Key] | None = None) -> Position:
    value = None if ended is None else end_of_backward(ended, needed)
    return Position(reason, "", dict.fromkeys(sent, (Use.ACCUMULATED,)), {}, value)


def test_what_was_sent_in_a_later_backward_waits() -> None:
    """Rank 0 is at the end of its first backward, rank 1 of its second, rank 2 at a step."""
    early, late = Key(0, 3, 0, 2, 0), Key(0, 3, 0, 2, 1)
    positions = [_at(Reason.BACKWARD, [early], 0), _at(Reason.BACKWARD, [early, late], 1), _at(Reason.STEP, [early])]
    assert {rank: list(sent) for rank, sent in due_offers(positions).items()} == {0: [early], 1: [early], 2: [early]}
    assert list(due_offers(positions[1:])[0]) == [early, late]
    assert list(due_offers([_at(Reason.STEP, [late])])[0]) == [late]


def test_only_what_cannot_wait_is_added_up_within_backwards() -> None:
    """Rank 0 is at the end of a backward, where a hook waits for one of the sums; rank 1 at a step."""
    seen, other = Key(0, 3, 0, 2, 0), Key(1, 3, 0, 2, 0)
    positions = [_at(Reason.BACKWARD, [seen, other], 0, [seen]), _at(Reason.STEP, [seen, other])]
    assert {rank: list(sent) for rank, sent in due_offers(positions).items()} == {0: [seen], 1: [seen]}
    assert list(due_offers(positions[1:])[0]) == [seen, other]


def test_backwards_are_counted_where_they_end_without_a_meeting() -> None:
    ranks = SimpleNamespace(meetings=5)
    unit = SimpleNamespace(index=1)
    keys = Keys(ranks)  # type: ignore[arg-type]
    found = [keys.next(unit), keys.next(unit)]  # type: ignore[arg-type]
    keys.end_backward()
    found.append(keys.next(unit))  # type: ignore[arg-type]
    ranks.meetings = 6
    keys.end_backward()
    found.append(keys.next(unit))  # type: ignore[arg-type]
    assert found == [Key(1, 5, 0, 2, 0), Key(1, 5, 0, 4, 0), Key(1, 5, 0, 2, 1), Key(1, 6, 0, 2, 0)]


# ---- one stray in a row of steps
def _with_a_stray(rank: int, world: int, stage: int, kind: str) -> list[Counted]:
    """Steps of which one has a stray; each is compared with plain torch. Returns the counts of each step."""
    messages: Counter[str] = Counter()
    # With less, ranks are nudged sooner than after 2 s, which a machine with other work may take.
    twin = Twin(rank, world, stage, transport="collective", timeout=60.0)
    twin.optimize()
    found = []
    for step in range(STEPS):
        program = STRAYS[kind].once if step == STRAY_AT else STRAYS[kind].always
        dist.barrier()
        messages.clear()
        with counting(messages):
            program(twin.model, rank)
            twin.optimizers[1].step()
            dist.barrier()
        found.append(counts_of(messages, world))
        twin.plain_play(program)
        twin.optimizers[0].step()
        twin.check()
        twin.zero_grad()
    twin.close()
    return found


@pytest.mark.parametrize("kind", STRAYS)
@STAGES_WITH_OTHERS
def test_a_stray_is_served_and_exact(ranks: Ranks, world: int, stage: int, kind: str) -> None:
    """It costs messages of the order, some one-sided reads, and one meeting more in that step. The next is as those
    before it: what a rank has done on a detour it does not expect again."""
    counted = ranks(world).run(_with_a_stray, stage, kind, timeout=LIMIT)
    for rank, steps in enumerate(counted):
        quiet = Counted(world - 1 if rank == 0 else 1, meetings=0, reads=0)
        assert [step for step in (*steps[2:STRAY_AT], *steps[STRAY_AT + 1 :]) if step != quiet] == []
    strayed = [steps[STRAY_AT] for steps in counted]
    # Two agreements, the Close of a want that not all share and that of a call that does not end; before each of these
    # every rank may have said something.
    agreements = 2 * 2 * (world - 1)
    closes = 2 * 2 * (world - 1)
    assert 2 * (world - 1) <= sum(each.ordered for each in strayed) <= agreements + closes
    assert {each.meetings for each in strayed} <= {0, 1}


def test_a_rank_that_evaluates_alone_is_not_waited_for(ranks: Ranks) -> None:
    """It reads its pages by itself, and the others none."""
    first, second = ranks(2).run(_with_a_stray, 3, "evaluates before a barrier", timeout=LIMIT)
    assert first[STRAY_AT].reads >= 3 * (BLOCKS + 1)
    assert second[STRAY_AT].reads == 0


def _evaluates_after_a_step(rank: int, world: int, clip: bool) -> list[float]:
    """Rank 0 reads pages while the others sit in a barrier, straight from their step or from their last meeting."""
    model = build()
    rg.shard(model, transport="collective", timeout=10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if clip:
        loss_of(model, batch(rank)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with torch.no_grad():
        if rank == 0:
            losses = [loss_of(model, batch(7, step)).item() for step in range(3)]
        dist.barrier()
        if rank == 1:
            losses = [loss_of(model, batch(7, step)).item() for step in range(3)]
    dist.barrier()
    return losses


@pytest.mark.parametrize("clip", [False, True])
def test_others_sit_in_a_barrier_after_a_step(ranks: Ranks, clip: bool) -> None:
    """Their service threads serve the rank that evaluates, and later that rank's the others."""
    first, second = ranks(2).run(_evaluates_after_a_step, clip, timeout=LIMIT)
    assert first == second


# ---- sums that are not complete
def _hooked(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    twin = Twin(rank, world, 3, transport="collective", timeout=20.0)
    pairs = seen_by_a_hook(twin)
    twin.close()
    return pairs


def test_hooks_see_complete_sums(ranks: Ranks) -> None:
    for pairs in ranks(2).run(_hooked, timeout=LIMIT):
        assert len(pairs) == 3
        assert all(torch.equal(seen, found) for seen, found in pairs)


def _captured(rank: int, world: int) -> Tensor:
    model = build()
    rg.shard(model, transport="collective", timeout=20.0)
    for step in range(3):
        loss = through(model, batch(rank, step), ORDERS[rank] if step == 2 else ORDERS[0])
        (grad,) = torch.autograd.grad(loss, [model.blocks[2].up.weight])
    dist.barrier()
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def test_autograd_grad_returns_complete_sums(ranks: Ranks) -> None:
    plain = build()
    parts = [
        torch.autograd.grad(through(plain, batch(rank, 2), ORDERS[rank]), [plain.blocks[2].up.weight])[0]
        for rank in range(2)
    ]
    for grad in ranks(2).run(_captured, timeout=LIMIT):
        assert torch.equal(grad, (parts[0] + parts[1]) / 2)


# ---- what cannot be reconciled
def _gives_up_alone(rank: int, world: int) -> str:
    model = build()
    rg.shard(model, transport="collective", timeout=20.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(rg.DivergenceError) as caught:
        with contextlib.suppress(ZeroDivisionError):
            backward_that_raises(model, batch(rank), raises=rank == 1)
        optimizer.step()
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_gives_up_what_all_have_brought(ranks: Ranks) -> None:
    for text in ranks(2).run(_gives_up_alone):
        assert "rank 1 gave up a backward after all ranks had brought their gradient of unit blocks." in text
        assert "rank 0 did not" in text


def _comes_for_something_else(rank: int, world: int) -> str:
    model = build()
    engine = rg.shard(model, transport="collective", timeout=20.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batch(rank)).backward()
    with pytest.raises(rg.DivergenceError) as caught:
        if rank == 0:
            optimizer.step()
        else:
            engine.full_grad("head.bias")
    dist.barrier()
    return str(caught.value)


def test_ranks_that_cannot_be_reconciled(ranks: Ranks) -> None:
    for text in ranks(2).run(_comes_for_something_else):
        assert "rank 0 is at an optimizer step" in text
        assert "rank 1 is at a value over all ranks" in text


def _never_comes(rank: int, world: int) -> str:
    """Rank 1 waits for rank 0 in a barrier, which waits for rank 1 at the end of its backward."""
    model = build()
    rg.shard(model, transport="collective", timeout=2.0)
    if rank == 1:
        dist.barrier()
        return ""
    with pytest.raises(rg.DivergenceError) as caught:
        loss_of(model, batch(rank)).backward()
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    text, _ = ranks(2).run(_never_comes)
    assert "rank 0 waited" in text
    assert "backward 1 since the last step" in text
    assert "rank 1 is outside" in text


def _edits_unseen(rank: int, world: int) -> str:
    """Rank 1 writes to its piece by a tensor that nobody watches, and does not come to what rank 0 reads."""
    model = build()
    rg.shard(model, transport="collective", timeout=5.0)
    for step in range(3):
        loss_of(model, batch(rank, step)).backward()
        model.zero_grad()
    if rank == 1:
        next(model.blocks[0].parameters()).local.mul_(2)  # type: ignore[attr-defined]
    dist.barrier()
    text = ""
    if rank == 0:
        with pytest.raises(rg.DivergenceError) as caught:
            loss_of(model, batch(rank))
        text = str(caught.value)
    dist.barrier()
    return text


def test_a_rank_that_has_edited_what_others_read_is_named(ranks: Ranks) -> None:
    text, _ = ranks(2).run(_edits_unseen)
    assert "rank(s) 1 at reading unit blocks.0" in text
    assert "its weights were not edited in the same way as the reader's" in text


def _gathered_after_an_edit(rank: int, world: int) -> str:
    model = build()
    engine = rg.shard(model, transport="collective")
    index = next(unit.index for unit in engine.units if unit.name == "blocks.0")
    assert engine._fence.shard_to_gather(index) is engine.units[index].shard
    next(model.blocks[0].parameters()).local.mul_(2)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError) as caught:
        engine._fence.shard_to_gather(index)
    return str(caught.value)


def test_an_edited_shard_is_no_courtesy(ranks: Ranks) -> None:
    """Others would take it for the shard at rest."""
    (text,) = ranks(1).run(_gathered_after_an_edit)
    assert "it has edited unit blocks.0 since the last step" in text
