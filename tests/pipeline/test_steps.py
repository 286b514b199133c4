"""What a pipeline does besides the plain step: other shapes, evaluation, meta models, compiled stages."""

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.device_mesh import init_device_mesh

import retrograde as rg
from retrograde.pipeline import Schedule
from retrograde.pipeline.blocks import Chain, blocks_of, measured
from retrograde.pipeline.generators import GENERATORS
from retrograde.transport.connections import Connections
from retrograde.transport.messages import Lent
from tests.harness import RankPool
from tests.pipeline.cases import CASES, WIDTH, Data, Fn, Scaled, backward_order, lin, plain_step, tanhs

Ranks = Callable[[int], RankPool]


def same(pipe: rg.Pipeline, blocks: list[nn.Module]) -> bool:
    whole = dict(nn.ModuleList(blocks).named_parameters())
    return all(torch.equal(p.grad, whole[name].grad) for name, p in pipe.named_parameters())


def changing_shapes(rank: int, world: int, schedule: str) -> list[bool]:
    """Steps with other batch sizes and other lengths, back and forth."""
    torch.manual_seed(0)
    case = CASES["transformer"]
    blocks = case.blocks()
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule=schedule, microbatches=4, loss=case.loss)
    right = []
    for batch, length in ((8, 3), (5, 7), (8, 3), (8, 3), (4, 1)):
        data = Data((torch.randint(0, 11, (batch, length)),), torch.randint(0, 11, (batch, length)))
        wanted = plain_step(blocks, data, case.loss, backward_order(pipe.schedule))
        right.append(torch.equal(pipe.step(*data.args, target=data.target), wanted) and same(pipe, blocks))
    return right


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_shapes_may_change_from_step_to_step(ranks: Ranks, schedule: str) -> None:
    assert all(all(right) for right in ranks(2).run(changing_shapes, schedule))


def microbatches_of_their_own(rank: int, world: int) -> bool:
    """Different lengths in one step; weights are by number of samples."""
    torch.manual_seed(0)
    blocks = CASES["transformer"].blocks()
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule="zb-h1", microbatches=3, loss=CASES["transformer"].loss)
    words = [torch.randint(0, 11, (n, length)) for n, length in ((2, 3), (4, 5), (1, 2))]
    loss = pipe.step(rg.Microbatches(words), target=rg.Microbatches(words))
    total = torch.zeros(())
    for part in words:
        value = CASES["transformer"].loss(Chain(blocks)(part), part) * (len(part) / 7)
        value.backward()
        total = total + value.detach()
    return torch.equal(loss, total) and same(pipe, blocks)


def test_microbatches_may_differ(ranks: Ranks) -> None:
    assert ranks(2).run(microbatches_of_their_own) == [True, True]


def messages(rank: int, world: int) -> list[tuple[int, int]]:
    """How many messages each of three steps sends, and how many of them carry a layout."""
    pipe = rg.Pipeline(tanhs(8), schedule="1f1b", microbatches=4, loss=F.mse_loss)
    original, counts = Connections.post, []
    sent: list[Any] = []

    def counting(self: Connections, dst: int, message: Any, data: Any = ()) -> bool:
        sent.append(message)
        return original(self, dst, message, data=data)

    Connections.post = counting  # type: ignore[method-assign]
    try:
        for batch in (8, 8, 12):
            pipe.step(torch.randn(batch, WIDTH), target=torch.randn(batch, WIDTH))
            contents = [message for message in sent if isinstance(message, Lent)]  # the rest is the step's agreement
            counts.append((len(contents), sum(message.form is not None for message in contents)))
            sent.clear()
    finally:
        Connections.post = original  # type: ignore[method-assign]
    return counts


def test_stable_layouts_are_not_sent_again(ranks: Ranks) -> None:
    """One message for each microbatch and direction, whatever it carries."""
    assert ranks(2).run(messages) == [[(4, 4), (4, 0), (4, 4)]] * 2


def evaluation(rank: int, world: int, schedule: str) -> tuple[bool, ...]:
    torch.manual_seed(0)
    blocks = [*tanhs(4), *(Fn(lambda m, x: m.d(m.a(x)), a=lin(), d=nn.Dropout()) for _ in range(4))]
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule=schedule, microbatches=4, loss=F.mse_loss).eval()
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    with torch.no_grad():
        wanted = Chain(blocks).eval()(x)
    result, alone = pipe.evaluate(x, target=y), pipe.evaluate(x)
    outputs = torch.cat(result.outputs) if result.outputs else wanted
    return (
        torch.equal(outputs, wanted),
        bool(result.outputs) == (pipe.schedule.last_stage in pipe.stages),
        torch.allclose(result.loss, F.mse_loss(wanted, y)),  # a mean of four means
        alone.loss is None,
        all(p.grad is None for p in pipe.parameters()),
        not any(stage.flights for stage in pipe.stages.values()),
    )


@pytest.mark.parametrize("schedule", ["gpipe", "zb-v"])
def test_evaluation_is_forward_only(ranks: Ranks, schedule: str) -> None:
    assert all(all(right) for right in ranks(2).run(evaluation, schedule))


def outputs_of_a_step(rank: int, world: int) -> bool:
    blocks = tanhs(4)
    pipe = rg.Pipeline(blocks, schedule="zb-h1", microbatches=2, loss=F.mse_loss)
    result = pipe.run(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))
    return all(not out.requires_grad and out.grad_fn is None for out in result.outputs) and len(result.outputs) == (
        2 if rank == 1 else 0
    )


def test_a_step_may_return_outputs_detached(ranks: Ranks) -> None:
    assert ranks(2).run(outputs_of_a_step) == [True, True]


def output_is_the_loss(rank: int, world: int) -> bool:
    torch.manual_seed(0)
    blocks = [*tanhs(3), Fn(lambda m, x: m.a(x).square().mean(), a=lin())]
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule="1f1b", microbatches=2)
    x = torch.randn(4, WIDTH)
    loss = pipe.step(x)
    parts = [Chain(blocks)(part) * 0.5 for part in x.chunk(2)]
    for part in parts:
        part.backward()
    return torch.equal(loss, (parts[0] + parts[1]).detach()) and same(pipe, blocks)


def test_without_a_loss_function_the_output_is_the_loss(ranks: Ranks) -> None:
    assert ranks(2).run(output_is_the_loss) == [True, True]


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(11, 8), lin()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.up(self.embed(words))  # type: ignore[no-any-return]


def _words_to_words() -> nn.Sequential:
    return nn.Sequential(_Words(), nn.LayerNorm(8), lin(), lin(8, 11))


def _draw(module: nn.Module) -> None:
    """As it is given to `apply`: the first block sets what is in it again."""
    if isinstance(module, _Words):
        nn.init.normal_(module.up.weight, std=0.5)
    for param in module.parameters(recurse=False):
        nn.init.uniform_(param)


def on_meta(rank: int, world: int, init: Callable[[nn.Module], None] | None) -> tuple[bool, bool]:
    """Each rank makes only its own stages, with the values of a model built whole with the same seed."""
    with torch.device("meta"):
        model = _words_to_words()
    torch.manual_seed(3)
    pipe = rg.Pipeline(model, schedule="zb-h1", microbatches=2, loss=CASES["transformer"].loss, init=init)
    torch.manual_seed(3)
    whole = _words_to_words()
    if init is not None:
        torch.manual_seed(3)
        for block in whole:
            block.apply(init)
    mine = dict(pipe.named_parameters())
    values = dict(whole.named_parameters())
    others = [p for name, p in model.named_parameters() if name not in mine]
    words = torch.randint(0, 11, (4, 3))
    pipe.step(words, target=words)
    return all(torch.equal(p, values[n]) for n, p in mine.items()), all(p.device.type == "meta" for p in others)


@pytest.mark.parametrize("init", (None, _draw))
def test_meta_models(ranks: Ranks, init: Callable[[nn.Module], None] | None) -> None:
    assert ranks(2).run(on_meta, init) == [(True, True), (True, True)]


def cut_by(rank: int, world: int) -> tuple[list[str], list[str]]:
    model = nn.Sequential(nn.Sequential(lin(), lin()), lin(), lin())
    named = rg.Pipeline(model, schedule="1f1b", microbatches=2, cut=rg.Cut(at=["0.1"]))
    timed = rg.Pipeline(model, schedule="1f1b", microbatches=2, cut=rg.Cut(costs=[1.0, 1.0, 1.0, 3.0]))
    return [n for n, _ in named.named_parameters()][::2], [n for n, _ in timed.named_parameters()][::2]


def test_cuts_by_name_and_by_cost(ranks: Ranks) -> None:
    first, second = ranks(2).run(cut_by)
    assert first == (["0.0.weight"], ["0.0.weight", "0.1.weight", "1.weight"])
    assert second == (["0.1.weight", "1.weight", "2.weight"], ["2.weight"])


class Slow(nn.Module):
    """Takes its time, counts its calls and draws random numbers, none of which a measurement may leave behind."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.a = seconds, lin()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        self.calls += 1
        return F.dropout(self.a(x))


def cut_by_time(rank: int, world: int, zero: bool) -> tuple[list[str], bool]:
    torch.manual_seed(0)
    blocks = [Slow(0.1), Slow(0.0), Slow(0.0), Slow(0.0)]
    before, state = torch.get_rng_state(), copy.deepcopy(nn.ModuleList(blocks).state_dict())
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    cut = rg.Cut(sample=(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1)),))
    sharded = rg.Zero(stage=2, mesh=mesh["dp"]) if zero else None
    pipe = rg.Pipeline(
        copy.deepcopy(blocks), schedule="1f1b", microbatches=2, loss=F.mse_loss, mesh=mesh["pp"], zero=sharded, cut=cut
    )
    same = torch.equal(before, torch.get_rng_state())
    for name, p in pipe.named_parameters():
        whole = p if pipe.engine is None else p.shown()
        same = same and torch.equal(whole, state[name]) and p.grad is None
    calls = [b for module in pipe.modules() for b in module.buffers()]
    names = sorted({name.split(".")[0] for name, _ in pipe.named_parameters()})
    return names, same and not any(calls)


@pytest.mark.parametrize("zero", (False, True))
def test_cuts_by_measured_time(ranks: Ranks, zero: bool) -> None:
    """By parameters it would be two blocks each."""
    found = ranks(4 if zero else 2).run(cut_by_time, zero)
    assert found[0] == (["0"], True) and found[-1] == (["1", "2", "3"], True)
    assert all(same for _, same in found)


def test_models_on_meta_cannot_be_timed() -> None:
    with torch.device("meta"):
        blocks = blocks_of([lin(), lin()])
    with pytest.raises(rg.PipelineError, match=r"block 0 is on the meta device and cannot be timed; give costs="):
        measured(blocks, (torch.randn(2, WIDTH),), {})


def compiled(rank: int, world: int, schedule: str) -> bool:
    torch._dynamo.reset()
    torch.manual_seed(0)
    case = CASES["transformer"]
    blocks = case.blocks()
    ours = [torch.compile(block, backend="aot_eager") for block in copy.deepcopy(blocks)]
    pipe = rg.Pipeline(ours, schedule=schedule, microbatches=4, loss=case.loss)
    right = True
    for _ in range(2):
        data = case.data()
        wanted = plain_step(blocks, data, case.loss, backward_order(pipe.schedule))
        right &= torch.equal(pipe.step(*data.args, target=data.target), wanted)
        whole = dict(nn.ModuleList(blocks).named_parameters())
        right &= all(torch.equal(p.grad, whole[n.replace("_orig_mod.", "")].grad) for n, p in pipe.named_parameters())
    torch._dynamo.reset()
    return right


@pytest.mark.parametrize("schedule", GENERATORS)
def test_compiled_blocks(ranks: Ranks, schedule: str) -> None:
    assert ranks(2).run(compiled, schedule, timeout=110) == [True, True]


def wrapped(rank: int, world: int) -> tuple[bool, str]:
    """Each block gets the keyword arguments that the module inside takes, and what none takes is refused."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = [lin(), lin(), Scaled(), Scaled(), *tanhs(2)]
    wrappers = (_compiled, checkpoint_wrapper, _compiled, checkpoint_wrapper, nn.Sequential, offload_wrapper)
    ours = [wrap(block) for wrap, block in zip(wrappers, copy.deepcopy(blocks), strict=True)]
    ours[0] = checkpoint_wrapper(ours[0])
    pipe = rg.Pipeline(ours, schedule="zb-h1", microbatches=2, loss=F.mse_loss)
    x = torch.randn(4, WIDTH)
    data = Data((x,), x, {"mask": torch.rand(4), "scale": 0.5})
    wanted = plain_step(blocks, data, F.mse_loss, backward_order(pipe.schedule))
    right = torch.equal(pipe.step(x, target=x, **data.options), wanted)
    right &= all(map(torch.equal, *([p.grad for p in each] for each in (pipe.parameters(), mine(pipe, blocks)))))
    with pytest.raises(rg.PipelineError) as raised:
        pipe.step(x, target=x, masks=data.options["mask"])
    torch._dynamo.reset()
    return right, str(raised.value)


def _compiled(block: nn.Module) -> nn.Module:
    return torch.compile(block, backend="aot_eager")  # type: ignore[return-value]


def mine(pipe: rg.Pipeline, blocks: list[nn.Module]) -> Iterator[nn.Parameter]:
    """The parameters of the plain blocks that this rank's blocks stand for."""
    for name, _ in pipe.named_blocks():
        yield from blocks[int(name)].parameters()


def test_blocks_in_wrappers_of_torch(ranks: Ranks) -> None:
    for right, text in ranks(2).run(wrapped, timeout=110):
        assert right
        assert "no block accepts it; give target=... for the loss, or keyword arguments" in text
        assert "(input, mask, scale, x)" in text


def own_schedule(rank: int, world: int) -> tuple[bool, list[str]]:
    text = "schedule mine microbatches=2 placement=0,1\nrank 0: 0F0 0F1 0I0 0B1 0W0\nrank 1: 1F0 1I0 1F1 1B1 1W0\n"
    torch.manual_seed(0)
    blocks = tanhs(4)
    pipe = rg.Pipeline(copy.deepcopy(blocks), schedule=Schedule.parse(text), microbatches=2, loss=F.mse_loss)
    x = torch.randn(4, WIDTH)
    plain_step(blocks, Data((x,), x), F.mse_loss, [1, 0])
    pipe.step(x, target=x)
    return same(pipe, blocks), [str(done.action) for done in pipe.trace if done.action.kind.is_compute]


def test_a_schedule_of_ones_own(ranks: Ranks) -> None:
    first, second = ranks(2).run(own_schedule)
    assert first == (True, ["0F0", "0F1", "0I0", "0B1", "0W0"])
    assert second == (True, ["1F0", "1I0", "1F1", "1B1", "1W0"])


def explained(rank: int, world: int) -> tuple[str, str]:
    torch.manual_seed(0)
    blocks = [
        lin(),
        nn.Sequential(nn.LayerNorm(WIDTH), lin()),
        Fn(lambda m, x: torch.einsum("bi,io->bo", x, m.w), w=torch.randn(WIDTH, WIDTH)),
        lin(),
    ]
    pipe = rg.Pipeline(blocks, schedule="zb-h1", microbatches=2, loss=F.mse_loss)
    before = pipe.explain()
    x = torch.randn(4, WIDTH)
    pipe.step(x, target=x)
    return before, pipe.explain()


def test_explain_lists_what_does_not_wait(ranks: Ranks) -> None:
    """On each rank two matrices of 8 by 8, 2 rows a microbatch: 2 * 2 * 8 * 8 FLOPs each."""
    (before, first), (_, second) = ranks(2).run(explained)
    assert before == "stage 0: no backward has been split yet"
    assert first.splitlines() == [
        "stage 0: 100.0% of the weight gradients' work waits for W (512 FLOPs a microbatch)",
        "  in I: layer_norm, 0.0%: 1.0.weight, 1.0.bias",
    ]
    assert second.splitlines() == [
        "stage 1: 50.0% of the weight gradients' work waits for W (512 FLOPs a microbatch)",
        "  in I: einsum, 50.0%: 0.w",
    ]
