"""What stages may hand on: trees whose containers both sides know, and never code."""

import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_flatten, tree_unflatten

import retrograde as rg
from retrograde.pipeline.payload import Payload, content_of, form_of
from retrograde.pipeline.trees import constant_of, describe, describe_constant, spec_of
from retrograde.transport.messages import (
    Address,
    Constant,
    Content,
    Form,
    Group,
    MessageError,
    TensorLayout,
    TreeLeaf,
    TreeNode,
    decode,
    encode,
)
from retrograde.transport.tensors import space_for
from tests.harness import RankPool
from tests.pipeline.cases import WIDTH, Fn, lin

Ranks = Callable[[int], RankPool]


class Pair(NamedTuple):
    left: Any
    right: Any


Old = namedtuple("Old", "a b")


@dataclass
class Box:
    x: Any
    note: Any = None


pytree.register_dataclass(Box)


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As in Hugging Face's transformers: a dictionary with attributes, registered with its keys as context."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


pytree.register_pytree_node(
    ModelOutput,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: ModelOutput(zip(keys, values, strict=True)),
)


class Colour(Enum):
    RED = 1


TREES: dict[str, Any] = {
    "a tensor": torch.ones(2),
    "a list": [torch.ones(2), [torch.zeros(1)]],
    "a dict": {"a": torch.ones(2), 3: torch.zeros(1), (1, "b"): None},
    "an OrderedDict": OrderedDict(b=torch.ones(2), a=1),
    "a defaultdict": defaultdict(list, a=torch.ones(2)),
    "a deque": deque([torch.ones(2), 1], maxlen=5),
    "a named tuple": Pair(torch.ones(2), Old(1, "b")),
    "a dataclass": Box(torch.ones(2)),
    "a model's output": ModelOutput(logits=torch.ones(2), hidden=(torch.zeros(1), torch.ones(1))),
    "empty tensors": [torch.empty(0, 3), torch.empty(3, 0), torch.empty(2, 0, 3), torch.empty(0)],
    "what torch returns": torch.max(torch.ones(2, 2), 0),
}


def _same(one: Any, other: Any) -> bool:
    mine, mine_spec = tree_flatten(one)
    theirs, theirs_spec = tree_flatten(other)
    equal = [
        type(a) is type(b) and (torch.equal(a, b) if isinstance(a, Tensor) else a == b)
        for a, b in zip(mine, theirs, strict=True)
    ]
    return all(equal) and mine_spec == theirs_spec and type(one) is type(other)


@pytest.mark.parametrize("name", TREES)
def test_trees_come_as_they_went(name: str) -> None:
    payload = Payload.of(TREES[name])
    sent = encode(Content(0, Address(True, 0, 0), 0, form_of(payload)))
    came = decode(sent)
    assert isinstance(came, Content) and came.form is not None
    assert _same(content_of(came.form, payload.tensors).tree(), TREES[name])  # type: ignore[union-attr]


CONSTANTS = [
    None,
    True,
    1,
    1.0,
    -0.0,
    2**63,
    -(2**70),
    1j,
    "text",
    b"bytes",
    (1, (2,)),
    [1, []],
    {"a": {1: 2}},
    {1, 2},
    frozenset("a"),
    slice(1, None),
    range(3),
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cpu"),
]


@pytest.mark.parametrize("constant", CONSTANTS, ids=repr)
def test_constants_come_as_they_went(constant: Any) -> None:
    came = constant_of(describe_constant(constant))
    assert type(came) is type(constant) and repr(came) == repr(constant)


OTHERS = [Colour.RED, print, lambda: None, object(), Colour]


@pytest.mark.parametrize("constant", OTHERS, ids=lambda it: type(it).__name__)
def test_other_constants_are_refused_by_name(constant: Any) -> None:
    kind = f"{type(constant).__module__}.{type(constant).__qualname__}"
    with pytest.raises(rg.PipelineError) as caught:
        form_of(Payload.of({"x": torch.ones(1), "y": constant}))
    assert str(caught.value).startswith(f"a {kind} cannot be sent to another stage: stages may hand on tensors, ")
    assert "register the type with torch.utils._pytree.register_pytree_node on all ranks" in str(caught.value)


def test_containers_that_cannot_be_found_are_refused_by_name() -> None:
    local = namedtuple("local", "a")
    with pytest.raises(rg.PipelineError, match=r"the named tuple \S+\.local cannot be found by its name"):
        form_of(Payload.of(local(torch.ones(1))))
    with pytest.raises(rg.PipelineError, match=r"a defaultdict of <enum 'Colour'> cannot be sent to another"):
        form_of(Payload.of(defaultdict(Colour, a=torch.ones(1))))  # type: ignore[arg-type]


def _named(module: str, name: str) -> Constant:
    return Group("tuple", [module, name])


HOSTILE: dict[str, tuple[TreeLeaf | TreeNode, str]] = {
    "a function": (
        TreeNode("os.system", None, [TreeLeaf()]),
        r"a os\.system came from another stage and is not registered",
    ),
    "a class": (TreeNode("subprocess.Popen", None, [TreeLeaf()]), r"a subprocess\.Popen came from another stage"),
    "a function as a named tuple": (
        TreeNode("collections.namedtuple", _named("os", "system"), [TreeLeaf()]),
        r"\('os', 'system'\) came from another stage and is not a named tuple",
    ),
    "a class as a named tuple": (
        TreeNode("collections.namedtuple", _named("subprocess", "Popen"), [TreeLeaf()]),
        r"is not a named tuple of a module imported on this rank",
    ),
    "a module that is not imported": (
        TreeNode("collections.namedtuple", _named("antigravity", "fly"), []),
        r"antigravity",
    ),
    "no name at all": (
        TreeNode("collections.namedtuple", 3, []),
        r"3 came from another stage and is not a named tuple",
    ),
    "a default that is called": (
        TreeNode("collections.defaultdict", Group("list", ["os.getpid", Group("list", [])]), []),
        r"a defaultdict of 'os\.getpid' came from another stage",
    ),
    "an unknown constant": (TreeNode("builtins.dict", Group("eval", ["1"]), []), r"'eval' is not a kind of constant"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_description_cannot_name_what_is_not_registered(name: str) -> None:
    description, said = HOSTILE[name]
    before = set(sys.modules)
    with pytest.raises(MessageError, match=said):
        spec_of(description)
    assert set(sys.modules) == before


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3), (0, 0), (5, 0, 0)], ids=str)
def test_empty_tensors_travel(shape: tuple[int, ...]) -> None:
    """Also those whose empty dimension is not the first."""
    whole = torch.empty(shape)
    for sent in (whole, whole.mT if whole.dim() > 1 else whole, whole.new_empty(7, 7)[:, :0]):
        (came,) = space_for(form_of([sent]), 0, torch.device("cpu"))
        assert came is not None and came.shape == sent.shape


def test_layouts_are_checked_before_memory_is_taken() -> None:
    cpu = torch.device("cpu")

    def form(size: tuple[int, ...], stride: tuple[int, ...]) -> Form:
        return Form((TensorLayout(size, stride, torch.float32, False),), None)

    with pytest.raises(MessageError, match=f"8 bytes of tensors with a layout of {2**52}"):
        space_for(form((2**50,), (1,)), 8, cpu)
    with pytest.raises(MessageError, match=r"a tensor of shape \(2,\) and strides \(1099511627776,\) was announced"):
        space_for(form((2,), (2**40,)), 8, cpu)
    with pytest.raises(MessageError, match=r"a tensor of shape \(2,\) and strides \(\) was announced"):
        space_for(form((2,), ()), 8, cpu)
    layout = form_of(Payload.of({"a": torch.ones(1)}))
    with pytest.raises(MessageError, match="a tree of 1 leaves came with 2 tensors or constants"):
        content_of(layout, [torch.ones(1), torch.ones(1)])


# ---- between ranks
def _handed_on(rank: int, world: int, name: str) -> list[bool]:
    """A container that the first stage makes is taken apart by the last, after each stage has looked at it."""
    tree, seen = TREES[name], []

    def first(m: Any, x: Tensor) -> Any:
        return {"x": m.a(x), "tree": tree}

    def middle(m: Any, both: Any) -> Any:
        seen.append(_same(both["tree"], tree))
        return {"x": torch.tanh(m.a(both["x"])), "tree": both["tree"]}

    def last(m: Any, both: Any) -> Tensor:
        seen.append(_same(both["tree"], tree))
        return m.a(both["x"])

    blocks = [Fn(first, a=lin()), Fn(middle, a=lin()), Fn(last, a=lin())]
    pipe = rg.Pipeline(blocks, schedule="1f1b", microbatches=2, loss=F.mse_loss)
    pipe.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))
    return seen


@pytest.mark.parametrize("name", TREES)
def test_stages_hand_on_trees(ranks: Ranks, name: str) -> None:
    assert ranks(3).run(_handed_on, name, timeout=60) == [[], [True, True], [True, True]]


def _refusal(blocks: list[nn.Module]) -> str:
    pipe = rg.Pipeline(blocks, schedule="1f1b", microbatches=2, loss=F.mse_loss)
    with pytest.raises(rg.PipelineError) as caught:
        pipe.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))
    return str(caught.value)


def _not_handed_on(rank: int, world: int) -> str:
    blocks: list[nn.Module] = [
        Fn(lambda m, x: {"x": m.a(x), "c": Colour.RED}, a=lin()),
        Fn(lambda m, both: m.a(both["x"]), a=lin()),
    ]
    return _refusal(blocks)


def test_a_constant_that_cannot_travel_is_one_error_on_all_ranks(ranks: Ranks) -> None:
    here, there = ranks(2).run(_not_handed_on, timeout=60)
    assert here == there
    assert here.startswith("rank 0, stage 0, microbatch 0, action 0SEND_F0: ")
    assert "a tests.pipeline.test_trees.Colour cannot be sent to another stage" in here


def _registered_on_one(rank: int, world: int) -> str:
    class Late(list[Any]):
        pass

    if rank == 0:
        pytree.register_pytree_node(Late, lambda late: (list(late), None), lambda values, _: Late(values))
    blocks: list[nn.Module] = [Fn(lambda m, x: Late([m.a(x)]), a=lin()), Fn(lambda m, late: m.a(late[0]), a=lin())]
    return _refusal(blocks)


def test_a_container_that_only_the_sender_knows_is_named(ranks: Ranks) -> None:
    here, there = ranks(2).run(_registered_on_one, timeout=60)
    assert here == there
    assert "Late came from another stage and is not registered as a pytree node on this rank" in here


def test_constants_that_are_equal_and_differ_are_sent_again() -> None:
    assert encode(form_of(Payload.of([1]))) != encode(form_of(Payload.of([True]))) != encode(form_of(Payload.of([1.0])))


def test_descriptions_are_specs_again() -> None:
    leaves, spec = tree_flatten(TREES)
    assert _same(tree_unflatten(leaves, spec_of(describe(spec))), TREES)


def test_a_tensor_alone_is_a_tree_like_any_other() -> None:
    for tensor in (
        torch.randn(2, 3),
        torch.randn(2, 3).t(),
        torch.randn(4, 3)[::2],
        torch.randn(2, 3).requires_grad_(),
    ):
        alone, (inside,) = Payload.of(tensor), Payload.of([tensor]).layout.tensors
        leaves, spec = tree_flatten(tensor)
        assert alone.tensors[0] is leaves[0] is tensor and alone.tree() is tensor
        assert alone.layout.spec == spec and alone.layout.tensors == (inside,) and alone.layout.constants == (None,)
        assert inside is not None and inside.requires_grad is tensor.requires_grad
        assert form_of(alone) is form_of(Payload.of(tensor)), "made once"
        came = content_of(form_of(alone), [tensor])
        assert isinstance(came, Payload) and came.layout == alone.layout
