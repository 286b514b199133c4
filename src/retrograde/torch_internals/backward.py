"""The running backward: which one it is, what it will do, in which order, and where it ends."""

import contextlib
import functools
import weakref
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch

from retrograde.errors import InternalsChanged
from retrograde.torch_internals.probes import When, expect, find, probe, tiny

# ---- which
NO_BACKWARD = -1
current_backward: Callable[[], int] = find("torch._C:_current_graph_task_id")
"""The number of the backward that runs in this thread, or NO_BACKWARD."""


@probe(
    "the number of a backward",
    "current_backward",
    "NO_BACKWARD",
    needed_for="knowing to which backward a page or a gradient belongs, and which ones have raised",
    otherwise="gradients of nested backwards are mixed up; those of a backward that raised stay for ever",
    when=When.FIRST_USE,
)
def _backwards_are_numbered() -> None:
    """Assumes: torch numbers backwards in the order in which they begin, and says -1 where none runs."""
    seen: list[int] = []

    def nested(grad: torch.Tensor) -> None:
        seen.append(current_backward())
        inner = tiny(requires_grad=True)
        inner.register_hook(lambda grad: seen.append(current_backward()))
        with torch.enable_grad():
            inner.sum().backward()
        seen.append(current_backward())

    outer = tiny(requires_grad=True)
    outer.register_hook(nested)
    before = current_backward()
    outer.sum().backward()
    expect(current_backward(), before, "the number after a backward")
    first, second, again = seen
    expect(first == again, True, "the number of a backward before and after a nested one, being the same,")
    expect(before < first < second, True, f"{before} < {first} < {second}, numbers of backwards around each other,")


# ---- its end
at_end_of_backward: Callable[[Callable[[], None]], None] = find(
    "torch.autograd:Variable._execution_engine.queue_callback"
)
"""Have a call made when the backward that runs has done everything else."""


def follow_backward(ended: Callable[[], None]) -> Callable[[], bool]:
    """Call `ended` at the end of the running backward, and return a function that says whether it is over.

    A backward that raises makes no call, but drops the callback, so that it counts as over."""

    def end() -> None:
        ended()

    at_end_of_backward(end)
    kept = weakref.ref(end)
    return lambda: kept() is None


@probe(
    "the end of a backward",
    "at_end_of_backward",
    "follow_backward",
    needed_for="dropping the last pages of a backward and delivering what other ranks have brought",
    otherwise="pages stay in memory after a backward; gradients of other ranks are missing in .grad",
    when=When.FIRST_USE,
)
def _backwards_tell_their_end() -> None:
    """Assumes: a callback queued in a backward runs once, after its last node and before `backward()` returns. One that
    was queued in a backward that raised is let go of before `backward()` raises."""
    order: list[str] = []
    leaf = tiny(requires_grad=True)
    product = leaf * 2

    def queue(grad: torch.Tensor) -> None:
        at_end_of_backward(lambda: order.append("end"))
        order.append("first node")

    product.register_hook(queue)
    leaf.register_post_accumulate_grad_hook(lambda leaf: order.append("last node"))
    product.sum().backward()
    expect(order, ["first node", "last node", "end"], "the order")
    expect(_raised_backward_is_over(), [False, True], "whether a backward that raises is over, in it and after it,")


def _raised_backward_is_over() -> list[bool]:
    over: list[Callable[[], bool]] = []
    found: list[bool] = []

    def refuse(grad: torch.Tensor) -> None:
        over.append(follow_backward(lambda: None))
        found.append(over[0]())
        raise ArithmeticError

    product = tiny(requires_grad=True) * 2
    product.register_hook(refuse)
    with contextlib.suppress(ArithmeticError):
        product.sum().backward()
    return [*found, over[0]()]


# ---- what it will do
class Fate(Enum):
    """What the running backward does with a node."""

    RUNS = auto()
    SKIPPED = auto()
    CAPTURED = auto()  # `torch.autograd.grad` takes the gradient of this leaf


_executes: Callable[[Any], bool] = find("torch._C:_will_engine_execute_node")


def fate_of(node: Any) -> Fate:
    """What the running backward does with this node. Raises outside a backward."""
    try:
        runs = _executes(node)
    except InternalsChanged:
        raise
    except RuntimeError:
        if current_backward() == NO_BACKWARD:
            raise
        return Fate.CAPTURED
    return Fate.RUNS if runs else Fate.SKIPPED


@probe(
    "what a backward will run",
    "Fate",
    "fate_of",
    needed_for="backward(inputs=...), torch.autograd.grad() of parameters and weight gradients that wait for W",
    otherwise="gradients reach parameters that were not asked for, or not those that were",
    when=When.FIRST_USE,
)
def _fates_are_known() -> None:
    """Assumes: inside a backward torch says of a node whether it will run, and raises RuntimeError for a leaf whose
    gradient `torch.autograd.grad` takes."""
    leaf, other = tiny(requires_grad=True), tiny(requires_grad=True)
    fates: list[Fate] = []
    product = leaf * other
    accumulators = [node for node, _ in product.grad_fn.next_functions]
    product.register_hook(lambda grad: fates.extend(map(fate_of, accumulators)))
    total = product.sum()
    total.backward(retain_graph=True)
    expect(fates, [Fate.RUNS, Fate.RUNS], "the fate of two leaves in backward()")
    fates.clear()
    total.backward(retain_graph=True, inputs=[leaf])
    expect(fates, [Fate.RUNS, Fate.SKIPPED], "the fate of two leaves, one of which is in backward(inputs=...),")
    fates.clear()
    torch.autograd.grad(total, [leaf])
    expect(fates, [Fate.CAPTURED, Fate.SKIPPED], "the fate of two leaves, one of which is given to autograd.grad(),")


# ---- in which order
_AS_SOON_AS_READY = 2**64 - 2  # torch's own highest, of nodes that accumulate, is one more
_AFTER_ALL_ELSE = 0


def run_as_soon_as_ready(node: Any) -> None:
    """Have a backward run this node first among those that are ready."""
    node._set_sequence_nr(_AS_SOON_AS_READY)


def run_after_all_else(node: Any) -> None:
    """Have a backward run this node last among those that are ready."""
    node._set_sequence_nr(_AFTER_ALL_ELSE)


@probe(
    "the order of a backward",
    "run_as_soon_as_ready",
    "run_after_all_else",
    needed_for="dropping a page when its last gradient has come, and meeting other ranks once at the end",
    otherwise="more pages in memory during backward, and a meeting of all ranks for every unit",
    when=When.FIRST_USE,
)
def _order_can_be_set() -> None:
    """Assumes: of the nodes that are ready, a backward runs that with the highest sequence number, which can be set."""
    expect(_order_of(lambda first, second: None), ["second", "first"], "the order of two nodes")
    expect(_order_of(lambda first, second: run_as_soon_as_ready(first)), ["first", "second"], "the order, one raised,")
    expect(_order_of(lambda first, second: run_after_all_else(second)), ["first", "second"], "the order, one lowered,")


def _order_of(change: Callable[[Any, Any], None]) -> list[str]:
    """The order in which a backward runs two nodes that are ready at the same time."""
    tiny(requires_grad=True) * 2  # in a new thread this gets number 0, which neither of the others may have
    order: list[str] = []
    first, second = tiny(requires_grad=True) * 2, tiny(requires_grad=True) * 2
    first.register_hook(lambda grad: order.append("first"))
    second.register_hook(lambda grad: order.append("second"))
    change(first.grad_fn, second.grad_fn)
    (first + second).sum().backward()
    return order


# ---- what a graph saves
push_saved_tensor_hooks: Callable[[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], None] = find(
    "torch._C._autograd:_push_saved_tensors_default_hooks"
)
"""From now on graphs of this thread save what `pack` returns, and `unpack` makes a tensor of it again."""
pop_saved_tensor_hooks: Callable[[], None] = find("torch._C._autograd:_pop_saved_tensors_default_hooks")
"""Undo the last push."""

top_saved_tensor_hooks: Callable[[], tuple[Any, Any] | None] = functools.partial(
    find("torch._C._autograd:_top_saved_tensors_default_hooks"), True
)
"""The pair that was pushed last, also while something is traced; None if there is none."""
_why_forbidden: Callable[[], str | None] = find("torch._C._autograd:_saved_tensors_hooks_get_disabled_error_message")


def saved_tensor_hooks_forbidden() -> bool:
    """Does torch refuse saved-tensor hooks here, as inside torch.func.grad?"""
    return _why_forbidden() is not None


@probe(
    "hooks of saved tensors",
    "push_saved_tensor_hooks",
    "pop_saved_tensor_hooks",
    "top_saved_tensor_hooks",
    "saved_tensor_hooks_forbidden",
    needed_for="graphs that hold handles instead of pages",
    otherwise="every graph holds the pages it has used, so memory is that of the whole model",
)
def _hooks_of_saved_tensors() -> None:
    """Assumes: the pair that was pushed last packs what an operation saves and unpacks it when it is read; torch says
    which pair that is, and whether pairs are forbidden."""
    if saved_tensor_hooks_forbidden():
        return  # where this is imported: torch would refuse to push
    before = top_saved_tensor_hooks()
    pair: tuple[Any, Any] = (lambda tensor: "packed", lambda packed: tiny(1) if packed == "packed" else None)
    push_saved_tensor_hooks(*pair)
    try:
        expect(top_saved_tensor_hooks(), pair, "the pair of hooks that was pushed last")
        node: Any = (tiny(requires_grad=True) * tiny()).grad_fn
    finally:
        pop_saved_tensor_hooks()
    expect(top_saved_tensor_hooks(), before, "the pair of hooks before it")
    expect(list(node._saved_other.shape), [1], "the shape of what a graph has saved, and the hooks have replaced,")
    with torch.autograd.graph.disable_saved_tensors_hooks("a probe"):
        expect(saved_tensor_hooks_forbidden(), True, "whether hooks are forbidden, where they are,")


# ---- by hand
Seeds = tuple[torch.Tensor | None, ...]
_make_grads: Callable[..., Seeds] = find("torch.autograd:_make_grads")
_run: Callable[..., Any] = find("torch.autograd:Variable._execution_engine.run_backward")


def first_gradients(roots: tuple[Any, ...], grads: Seeds) -> Seeds:
    """The gradients with which `torch.autograd.backward` starts: the given ones, checked, or ones for scalars."""
    return _make_grads(roots, grads, is_grads_batched=False)


def run_backward(
    roots: tuple[Any, ...], seeds: Seeds, retain_graph: bool, create_graph: bool, inputs: tuple[Any, ...]
) -> None:
    """Run `torch.autograd.backward` without its check for torch functions, which would switch modes off meanwhile."""
    _run(roots, seeds, retain_graph, create_graph, inputs, allow_unreachable=True, accumulate_grad=True)


@probe(
    "a backward under a mode",
    "first_gradients",
    "run_backward",
    needed_for="checkpointed blocks in a pipeline's split backward",
    otherwise="a recompute saves other tensors than the forward, which torch's checkpoint refuses",
    when=When.FIRST_USE,
)
def _backward_by_hand() -> None:
    """Assumes: `torch.autograd.backward` is two calls, which make the first gradients and run the engine, and only
    the first of all looks for torch functions."""
    leaf = tiny(requires_grad=True)
    seen: list[str] = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    product = leaf * 3
    product.register_hook(lambda grad: grad.abs())
    total = product.sum()
    seeds = first_gradients((total,), (None,))
    with Recorder():
        run_backward((total,), seeds, False, False, ())
    expect("abs" in seen, True, "whether a mode sees what a hook computes")
    expect(leaf.grad is not None and leaf.grad.tolist(), [3.0, 3.0], "the gradient")


def node_class(function: type[torch.autograd.Function]) -> type:
    """The class of the nodes that an autograd Function makes."""
    made: type = function._backward_cls
    return made


@probe(
    "the node of a Function",
    "node_class",
    needed_for="refusing edits of weights that require grad in a compiled forward",
    otherwise="such an edit is refused where there was none, or lost",
)
def _functions_know_their_nodes() -> None:
    """Assumes: an autograd Function has the class of its nodes as `_backward_cls`."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

    made = Same.apply(tiny(requires_grad=True))  # type: ignore[no-untyped-call]
    expect(type(made.grad_fn) is node_class(Same), True, "whether a node is of that class")


# ---- who looks on
profiling: Callable[[], bool] = find("torch._C._autograd:_profiler_enabled")
"""Does torch's profiler record in this thread?"""


@probe(
    "whether a profiler records",
    "profiling",
    needed_for="names of units in profiles",
    otherwise="profiles have no names of units, or every page-in pays for one",
    when=When.DOCTOR,
)
def _profilers_are_known() -> None:
    """Assumes: torch says in each thread whether its profiler records there."""
    expect(profiling(), False, "the answer where no profiler runs")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        expect(profiling(), True, "the answer while one does")
    expect(profiling(), False, "the answer after it")
