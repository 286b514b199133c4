"""Things people write in training scripts, on sharded and on plain models: the same numbers, or torch's own error."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg
from retrograde.pages import edits
from tests.harness import Ranks
from tests.multiproc.idioms import Idiom, Loss, batch, both, net, sgd, trained, weight
from tests.stages import EACH_STAGE, OPPOSITE_STAGES


# ---- optimizers
def closure(model: nn.Module, loss: Loss) -> None:
    optimizer = sgd(model)

    def again() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(again)


def evaluating_after_each_step(model: nn.Module, loss: Loss) -> None:
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: loss(9))
    for step in range(3):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()


def decay_by_dimensions(model: nn.Module, loss: Loss) -> list[int]:
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.5}]
    groups += [{"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    loss().backward()
    optimizer.step()
    return [len(group["params"]) for group in groups]


# ---- freezing
def frozen_after_a_window(model: nn.Module, loss: Loss) -> None:
    engine = getattr(model, "_retrograde_engine", None)
    if engine is None:
        loss().backward()
    else:
        with engine.no_sync():
            loss().backward()
    model[1][0].weight.requires_grad_(False)
    loss(1).backward()


def frozen_between_backwards(model: nn.Module, loss: Loss) -> None:
    value = loss()
    value.backward(retain_graph=True)
    model[0].requires_grad_(False)
    value.backward()


# ---- gradients of gradients
def hessian_times_ones(model: nn.Module, loss: Loss) -> None:
    params = list(model.parameters())
    grads = torch.autograd.grad(loss(), params, create_graph=True)
    torch.autograd.backward(grads, [torch.ones_like(p) for p in params])


def norm_of_the_gradient(model: nn.Module, loss: Loss) -> Tensor:
    grads = torch.autograd.grad(loss(), list(model.parameters()), create_graph=True)
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    norm.backward()
    return norm.detach()


def squared_gradient(model: nn.Module, loss: Loss) -> Tensor:
    value = loss()
    grads = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
    penalty = sum(grad.pow(2).sum() for grad in grads)
    (value + penalty).backward()
    return penalty.detach()


def third_derivative(model: nn.Module, loss: Loss) -> None:
    params = list(model.parameters())
    grads = torch.autograd.grad(loss(), params, create_graph=True)
    again = torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), params, create_graph=True)
    sum(grad.pow(2).sum() for grad in again).backward()


# ---- what is computed from gradients and parameters
def largest_elements(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    return torch.topk(weight(model).grad.abs().flatten(), 3).values


def views_of_gradients(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    grad = weight(model).grad
    rows = grad.view(8, 8).norm(dim=1)
    return torch.stack([grad.unsqueeze(0).norm(), grad.t()[0].norm(), grad.T[1].norm(), *rows, grad.chunk(2)[1].sum()])


def masks_of_gradients(model: nn.Module, loss: Loss) -> list[bool]:
    loss().backward()
    grad = weight(model).grad
    last = torch.zeros(64)
    last[-1] = torch.inf
    weight(model).grad = last.view(8, 8)
    odd = weight(model).grad
    found = [bool((~torch.isfinite(g)).any()) for g in (grad, odd)]
    found += [bool((g.isnan() | g.isinf()).any()) for g in (grad, odd)]
    weight(model).grad = None
    return found


def penalties_of_views(model: nn.Module, loss: Loss) -> Tensor:
    matrix = weight(model)
    rows = sum(row.norm() for row in matrix)
    value = matrix.t().norm() + matrix[0].pow(2).sum() + matrix.T[1].sum() + matrix.flatten().norm() + rows
    value.backward()
    return value.detach()


def gradients_kept_from_before(model: nn.Module, loss: Loss) -> Tensor:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    grads = [param.grad for param in model.parameters()]
    loss().backward()
    largest = torch.stack([grad.abs().max() for grad in grads])
    torch._foreach_mul_(grads, 0.5)
    return largest


def clipped_with_a_plain_parameter(model: nn.Module, loss: Loss) -> Tensor:
    extra = nn.Parameter(torch.ones(3))
    extra.grad = torch.ones(3)
    loss().backward()
    return torch.nn.utils.clip_grad_norm_([*model.parameters(), extra], 1.0)


def a_new_head_called_by_hand(model: nn.Module, loss: Loss) -> None:
    torch.manual_seed(1)
    model.add_module("head", nn.Linear(3, 2))

    def forward(x: Tensor) -> Tensor:
        return model.head(model[2](model[1](model[0](x))))

    model.forward = forward
    trained(model, loss)


def edited_by_operators(model: nn.Module, loss: Loss) -> None:
    layer = model[1][0]
    assert isinstance(layer.weight, nn.Parameter)
    with torch.no_grad():
        layer.weight *= 0.5
        layer.bias += 1.0
    trained(model, loss)
    assert layer.weight is not None and [*layer._parameters] == ["weight", "bias"]


def tied_afterwards(model: nn.Module, loss: Loss) -> None:
    """First to a plain layer, as a parameter; then to a layer that is sharded, as the layer shows it."""
    torch.manual_seed(1)
    layer = nn.Linear(8, 8)
    layer.weight = weight(model)
    model[1].append(layer)
    trained(model, loss)
    layer.bias = model[1][0].bias
    assert len(list(model.parameters())) == len({id(param) for param in model.parameters()}) == 6
    trained(model, loss)


def largest_of_many(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    return torch.stack(torch._foreach_max([param.grad for param in model.parameters()]))


def noise(model: nn.Module, loss: Loss) -> None:
    loss().backward()
    torch.manual_seed(7)
    for param in model.parameters():
        param.grad.add_(torch.randn_like(param.grad), alpha=0.1)


def drawn_anew(model: nn.Module, loss: Loss) -> None:
    torch.manual_seed(7)
    for param in model.parameters():
        nn.init.normal_(param, std=0.02)
    with torch.no_grad():
        weight(model).data.uniform_(-1, 1)
        weight(model).bernoulli_(0.5)
        model[2].get_parameter("weight").exponential_(generator=torch.Generator().manual_seed(3))
    trained(model, loss)


def kept_before_assigning(model: nn.Module, loss: Loss) -> Tensor:
    before = weight(model).data
    for _ in range(30):
        weight(model).detach()
    weight(model).data = weight(model).data * 2
    return before.norm()


def reshaped_by_keyword(model: nn.Module, loss: Loss) -> Tensor:
    with torch.no_grad():
        return torch.reshape(weight(model), shape=(2, -1)).sum(1)


def retained(model: nn.Module, loss: Loss) -> None:
    model[1][0].weight.retain_grad()
    loss().backward()
    weight(model).grad.detach_()
    sgd(model).zero_grad()
    assert weight(model).grad is None


# ---- threads, which number their nodes from zero
def forward_in_a_thread(model: nn.Module, loss: Loss) -> None:
    with ThreadPoolExecutor(1) as pool:
        value, again = pool.submit(loss).result(), loss(1)
    (value + again).backward()


def all_of_it_in_a_thread(model: nn.Module, loss: Loss) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: loss().backward()).result()
        pool.submit(lambda: sgd(model).step()).result()


def captured_in_a_thread(model: nn.Module, loss: Loss) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(loss).result()
    return torch.stack([grad.norm() for grad in torch.autograd.grad(value, list(model.parameters()))])


IDIOMS = [
    closure,
    evaluating_after_each_step,
    decay_by_dimensions,
    frozen_after_a_window,
    frozen_between_backwards,
    hessian_times_ones,
    norm_of_the_gradient,
    squared_gradient,
    third_derivative,
    largest_elements,
    views_of_gradients,
    masks_of_gradients,
    penalties_of_views,
    gradients_kept_from_before,
    clipped_with_a_plain_parameter,
    a_new_head_called_by_hand,
    edited_by_operators,
    tied_afterwards,
    largest_of_many,
    noise,
    drawn_anew,
    kept_before_assigning,
    reshaped_by_keyword,
    retained,
    forward_in_a_thread,
    all_of_it_in_a_thread,
    captured_in_a_thread,
]


@EACH_STAGE
@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.__name__)
def test_idiom(ranks: Ranks, idiom: Idiom, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, net) == ["", ""]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 5, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return x.cfloat() @ self.weight


class Hollow(nn.Module):
    """Its root has no elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nothing = nn.Parameter(torch.empty(0))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x)) + self.nothing.sum()


def thin(model: nn.Module, loss: Loss) -> Tensor:
    """A column: its pieces broadcast with it."""
    column = model[0].get_parameter("weight")
    return ((column.detach() - torch.ones(8, 1)) ** 2).sum()


def column() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8, bias=False))


def clipped(model: nn.Module, loss: Loss) -> Tensor:
    loss().backward()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def sparse_table() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6, sparse=True), nn.Linear(6, 3))


def weight_norm() -> nn.Module:
    model = net()
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[0][0])  # keeps a graph in the module
    return model


def looked_up(model: nn.Module, loss: Loss) -> None:
    (model(torch.tensor([1, 4, 4])).sum() * 2).backward()
    for param in model.parameters():
        if param.grad.is_sparse:
            param.grad = param.grad.to_dense()


@OPPOSITE_STAGES
@pytest.mark.parametrize(
    ("make", "idiom"),
    ((Complex, clipped), (sparse_table, looked_up), (weight_norm, trained), (Hollow, trained), (column, thin)),
    ids=("complex", "sparse", "norm", "hollow", "column"),
)
def test_models(ranks: Ranks, make: Callable[[], nn.Module], idiom: Idiom, stage: int) -> None:
    assert ranks(2).run(both, stage, idiom, make) == ["", ""]


def _complex_on_the_wire(rank: int, world: int) -> float:
    model = Complex()
    engine = rg.shard(model, 3, precision=rg.Precision(reduce="bf16"))
    model(batch(rank)).abs().pow(2).mean().backward()
    return float(engine.full_grad("weight").imag.abs().max())


def test_complex_gradients_travel_whole(ranks: Ranks) -> None:
    assert min(ranks(2).run(_complex_on_the_wire)) > 0


def _before_sharding(rank: int, world: int, stage: int) -> str:
    model = net()
    kept = model(batch(rank)).sum()  # a graph that is alive
    rg.shard(model, stage)
    model(batch(rank)).sum().backward()
    assert kept.grad_fn is not None
    graded = net()
    graded(batch(rank)).sum().backward()
    try:
        rg.shard(graded, stage)
    except rg.ShardingError as error:
        return str(error)
    return "nothing was said"


@EACH_STAGE
def test_graphs_and_gradients_from_before(ranks: Ranks, stage: int) -> None:
    for said in ranks(2).run(_before_sharding, stage):
        assert "parameter 2.weight has a gradient already" in said and "zero_grad()" in said


def _older_graphs(rank: int, world: int, stage: int) -> list[str]:
    """Of the model before it was sharded, and of parameters that were added to it and used before its forward."""
    model = net()
    graphs = [model(batch(rank)).sum(), model[2].bias.sum()]
    rg.shard(model, stage)
    model.add_module("extra", nn.Linear(3, 2))
    graphs += [model.extra.weight.pow(2).sum(), model.extra.bias.sum()]
    model(batch(rank)).sum().backward()
    said = []
    for graph in graphs:
        with pytest.raises(RuntimeError) as refused:
            graph.backward()
        said.append(str(refused.value))
    model.zero_grad()
    model(batch(rank)).sum().backward()
    sgd(model).step()
    dist.barrier()
    return said


@EACH_STAGE
def test_graphs_from_before_do_not_run(ranks: Ranks, stage: int) -> None:
    for said in ranks(2).run(_older_graphs, stage):
        assert ["modified by an inplace operation" in each for each in said] == [True, False, True, False]
        assert "recorded before parameter 2.bias was sharded" in said[1] and "call rg.shard() first" in said[1]
        assert "recorded before parameter extra.bias was sharded" in said[3]


def _late(rank: int, world: int, stage: int) -> str:
    """A weight that no module uses is saved by no module's hooks."""
    model = net()
    rg.shard(model, stage)
    optimizer = sgd(model)
    inputs = batch(0).requires_grad_()
    late = F.linear(inputs, model[0][0].weight).pow(2).sum()
    model(batch(rank)).sum().backward()
    optimizer.step()
    try:
        late.backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


@EACH_STAGE
def test_a_step_between_forward_and_backward_of_a_loose_weight(ranks: Ranks, stage: int) -> None:
    for said in ranks(2).run(_late, stage):
        assert "modified by an inplace operation" in said


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def _parametrized(rank: int, world: int, frozen: bool) -> str:
    model, plain = net(), net()
    rg.shard(model, 3)
    model[0][0].weight.requires_grad_(not frozen)
    try:
        nn.utils.parametrize.register_parametrization(model[0][0], "weight", Halved())
    except (ValueError, rg.UnsupportedError) as error:
        state = model.state_dict()
        assert list(state) == list(plain.state_dict())
        assert torch.equal(model(batch(rank)), plain(batch(rank)))
        return str(error)
    return f"it was made of {[name for name, _ in model.named_buffers()]}"


@pytest.mark.parametrize("frozen", (False, True))
def test_parametrizing_a_sharded_model_is_refused(ranks: Ranks, frozen: bool) -> None:
    for rank, said in enumerate(ranks(2).run(_parametrized, frozen)):
        assert said.startswith(f"rank {rank}: parametrizing parameter 0.0.weight")
        assert "before rg.shard()" in said


def test_names_of_edits() -> None:
    assert all(map(edits, ("__iadd__", "__ilshift__", "__itruediv__", "__setitem__", "mul_", "copy_")))
    assert not any(map(edits, ("__init__", "__invert__", "__int__", "__index__", "__add__", "detach_", "mul")))
