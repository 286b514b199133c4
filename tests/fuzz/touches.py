"""What all ranks do with parameters and gradients between their backwards and the step.

Numbers are small and whole, or halves of such: sums are exact in any order. What a touch reads is recorded, and must be
what plain torch reads. Weights are small whole numbers again after it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

import retrograde as rg
from retrograde.parameters.part import Part
from tests.fuzz.recipes import Touch

Records = list[tuple[str, Tensor]]
RATE = 2.0**-4


class Toucher:
    """One side's model, what is kept of it, and what is drawn and seen in one touch."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def touch(self, touch: Touch) -> Records:
        self._generator = torch.Generator().manual_seed(touch.seed)
        self._kind = touch.kind
        self.seen: Records = []
        with torch.no_grad():
            TOUCHES[touch.kind](self)
            for param in self.params:
                param.copy_(param.round().clamp(-1.0, 1.0))
        return self.seen

    # ---- drawn
    def number(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self._generator))

    def values(self, like: Tensor) -> Tensor:
        """A plain tensor in the whole's shape."""
        return torch.randint(-2, 3, like.shape, generator=self._generator).double()

    def param(self) -> nn.Parameter:
        return self.params[self.number(len(self.params))]

    @property
    def graded(self) -> list[nn.Parameter]:
        return [param for param in self.params if param.grad is not None]

    def grads(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of one or two parameters, if any has one."""
        for _ in range(2):
            graded = self.graded
            if graded:
                param = graded[self.number(len(graded))]
                assert param.grad is not None
                yield param, param.grad

    # ---- seen
    def see(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, Part):
                value = value.full_tensor()
            self.seen.append((self._kind, torch.as_tensor(value).detach().clone()))


# ---- gradients
def beside_plain(at: Toucher) -> None:
    for _, grad in at.grads():
        mask = at.values(grad)
        grad.mul_(mask).add_(at.values(grad), alpha=0.5)
        grad.copy_(torch.where(mask > 0, grad, mask))
        at.see(mask - grad, torch.maximum(grad, mask), (grad == mask).sum())


def rows(at: Toucher) -> None:
    for _, grad in at.grads():
        if grad.dim() == 0 or len(grad) == 0:
            grad[...] = 2.0
            continue
        first, last = at.number(len(grad)), at.number(len(grad))
        grad[first] = 1.0
        grad[first:] = grad[first:] * 2
        grad[[last, first]] = grad[[first, last]]
        at.see(grad[last], grad[-1:].sum(), grad.narrow(0, first, 1))


def masks(at: Toucher) -> None:
    for _, grad in at.grads():
        grad[grad > 1] = 0.5
        grad.masked_fill_(at.values(grad) > 0, -1.0)
        at.see(grad[grad < 0].sum(), torch.where(grad > 0, grad, 0.0), (grad != 0).nonzero())


def assigned(at: Toucher) -> None:
    for param, grad in at.grads():
        choice = at.number(4)
        if choice == 0:
            param.grad = grad * 2 - at.values(grad)
        elif choice == 1:
            param.grad = at.values(grad)
        elif choice == 2:
            param.grad = param.detach() * 2  # itself would be one memory for both
        else:
            param.grad = None


def views_of_gradients(at: Toucher) -> None:
    for _, grad in at.grads():
        grad.view(-1).add_(1.0)
        flat = grad.detach().flatten()
        flat.mul_(0.5)
        at.see(flat, grad.reshape(-1, 1).sum(), grad.unsqueeze(0).amax() if grad.numel() else 0.0)


def computed(at: Toucher) -> None:
    for param, grad in at.grads():
        update = grad * 2 + at.values(grad)
        update.add_(param.detach()).clamp_(-4.0, 4.0)
        if update.dim() == 2:
            update.t().mul_(0.5)
            update[:, :1] = 1.0
        at.see(update, -update, update.abs().sum())
        param.grad = update


def of_others(at: Toucher) -> None:
    """Parameters and gradients beside those of the same shape, which may be cut elsewhere."""
    for one, two in itertools.pairwise(sorted(at.graded, key=lambda param: param.shape)):
        if one.shape != two.shape:
            continue
        assert one.grad is not None and two.grad is not None
        one.grad.add_(two.grad, alpha=0.5)
        two.mul_(one)
        at.see(one.grad * two.grad, torch.max(one, two), one + two.grad)
        torch._foreach_add_([one, two.grad], [two, one.grad])
        at.see(*torch._foreach_sub([one, two], [two.grad, one.grad]))
        two.grad = one.grad.clamp(-4.0, 4.0)
        one.grad.clamp_(-4.0, 4.0)


def averages(at: Toucher) -> None:
    """Kept from phase to phase, over steps, sharded and plain."""
    for number in range(at.number(len(at.params)) + 1):
        param = at.params[number]
        if number not in at.kept:
            at.kept[number] = param.detach().clone(), torch.zeros(param.shape, dtype=torch.double)
        sharded, plain = at.kept[number]
        sharded.lerp_(param, 0.5)
        plain.mul_(0.5).add_(sharded).add_(param)
        if param.grad is not None:
            sharded.copy_(sharded.round()).add_(param.grad.sign())
        at.see(sharded, plain, plain - sharded, (sharded - param).abs().sum())
        plain.copy_(plain.round().clamp(-4.0, 4.0))
        param.copy_(sharded.round())


# ---- numbers
def reductions(at: Toucher) -> None:
    for param, grad in at.grads():
        for tensor in (grad, param.detach(), grad * 2 - param):
            at.see(tensor.sum(), tensor.abs().sum().item(), tensor.norm(1), tensor.norm(0), torch.count_nonzero(tensor))
            at.see(bool((tensor > 0).any()), tensor.isfinite().all().item(), tensor.numel(), tensor.dim())
            if tensor.numel():
                at.see(tensor.max(), tensor.amin().item(), tensor.argmax(), tensor.norm(torch.inf), tensor.mean())
            if tensor.dim() == 2:
                at.see(tensor.sum(0), tensor.abs().sum(1, keepdim=True), tensor.any(1), tensor @ tensor.t())


# ---- lists
def lists(at: Toucher) -> None:
    grads = [param.grad for param in at.graded]
    if not grads:
        return
    plain = [at.values(grad) for grad in grads]
    torch._foreach_mul_(grads, 0.5)
    torch._foreach_add_(grads, plain, alpha=2.0)
    torch._foreach_sub_(plain, grads)
    at.see(*plain, *torch._foreach_maximum(grads, plain), *torch._foreach_norm(grads, 1))
    torch._foreach_clamp_max_(grads, 3.0)
    torch._foreach_lerp_([param.detach() for param in at.graded], grads, 0.5)


# ---- weights
def weights(at: Toucher) -> None:
    param = at.param()
    param.add_(at.values(param)).mul_(at.values(param))
    param.lerp_(at.values(param), 0.5)
    if param.grad is not None:
        param.sub_(param.grad, alpha=0.5)
        param -= param.grad * at.values(param)
    at.see(param, param.sign() * 2)
    if at.number(2):
        param.data = at.values(param)


def views_of_weights(at: Toucher) -> None:
    param = at.param()
    kept = param.data
    param.data.view(-1).add_(1.0)
    if param.dim() > 0 and len(param) > 0:
        row = at.number(len(param))
        param.data[row].neg_()
        param[row] = param[row] + 1
        param.detach().flatten()[-1:] = 0.0
    if param.dim() == 2:
        param.data.t().mul_(2.0)
        param.data.T[:1].zero_()
    at.see(kept, param.detach().sum())


def copies(at: Toucher) -> None:
    param = at.param()
    copied = copy.deepcopy(param)
    copied.mul_(2.0).add_(at.values(param))
    at.see(copied, param)
    param.copy_(copied)
    before = param.detach().clone()
    param.zero_()
    at.see(before)
    param.data.copy_(before)


def vectors(at: Toucher) -> None:
    vector = parameters_to_vector(at.params)
    at.see(vector, parameters_to_vector([param.grad for param in at.graded]) if at.graded else 0.0)
    vector_to_parameters(-vector, at.params)


def buffers(at: Toucher) -> None:
    for param, grad in at.grads():
        total = torch.zeros(param.shape, dtype=torch.double).add_(grad).mul_(param)
        history = torch.zeros(2, *param.shape, dtype=torch.double)
        history[1] = grad
        history[0].copy_(param.detach())
        torch.add(grad, total, out=total)
        at.see(total, history)
        grad.copy_(total.clamp(-4.0, 4.0))


# ---- optimizers
class OneByOne(Optimizer):
    """Goes through its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            closure()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.update(param, param.grad)

    def update(self, param: Tensor, grad: Tensor) -> None:
        raise NotImplementedError


class RowScaled(OneByOne):
    """Nobody knows it. Each row by the sign of its largest element."""

    def update(self, param: Tensor, grad: Tensor) -> None:
        if param.numel() > 0:
            largest = grad.amax(dim=-1, keepdim=True) if param.dim() > 1 else grad.max()
            self.state[param]["largest"] = largest
            param.sub_(grad * largest.sign(), alpha=RATE)


@rg.elementwise
class Signed(OneByOne):
    def update(self, param: Tensor, grad: Tensor) -> None:
        state = self.state[param]
        state["average"] = state.get("average", torch.zeros_like(param)).lerp(grad, 0.5)
        param.sub_(state["average"].sign())


# Those that divide move weights by less than a half, which is rounded away: only that they run is seen of them.
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5, nesterov=True, weight_decay=0.5),
    "sgd in a loop": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5, foreach=False, maximize=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.5, etas=(0.5, 2.0)),
    "adamw": lambda params: torch.optim.AdamW(params, lr=RATE),
    "fused adam": lambda params: torch.optim.Adam(params, lr=RATE, fused=True),
    "adafactor": lambda params: torch.optim.Adafactor([p for p in params if p.numel()], lr=RATE),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2 and p.numel()], lr=RATE),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=RATE, max_iter=1),
    "rows": RowScaled,
    "signed": Signed,
}


def optimizers(at: Toucher) -> None:
    """Two steps: the first makes the state. A closure sees gradients whole, and edits them."""
    make = OPTIMIZERS[sorted(OPTIMIZERS)[at.number(len(OPTIMIZERS))]]
    optimizer = make(at.params)
    needs_closure = isinstance(optimizer, torch.optim.LBFGS)

    def closure() -> Tensor:
        for param in at.graded:
            assert param.grad is not None
            param.grad.neg_()
            at.see(param.grad.sum(), param.shape, param)
        return torch.ones(())

    for _ in range(2):
        optimizer.step(closure if needs_closure or at.number(2) else None)
        for param in at.params:
            param.copy_(param.round())
    by_owners = isinstance(optimizer, torch.optim.Muon | torch.optim.Adafactor)  # who may keep it alone
    for state in () if by_owners else optimizer.state.values():
        at.see(*(len(value.shape) for value in state.values() if isinstance(value, Tensor)))


TOUCHES: dict[str, Callable[[Toucher], None]] = {
    each.__name__: each
    for each in (
        beside_plain,
        rows,
        masks,
        assigned,
        views_of_gradients,
        computed,
        of_others,
        averages,
        reductions,
        lists,
        weights,
        views_of_weights,
        copies,
        vectors,
        buffers,
        optimizers,
    )
}
