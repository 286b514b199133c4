"""Private names of torch, patches of it and details of the interpreter are in torch_internals, and nowhere else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from retrograde.torch_internals.modules import OVERRIDDEN

SOURCE = Path(__file__).parents[2] / "src" / "retrograde"
DOOR = "torch_internals"

# Python's own, documented though they begin with an underscore.
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
OF_THE_INTERPRETER = {"getrefcount", "_getframe", "cell_contents", "__closure__", "__set__", "get_referrers"}
OF_TORCH = {
    name
    for cls in (torch.Tensor, nn.Parameter, nn.Module, nn.RNNBase, torch.optim.Optimizer, torch.UntypedStorage)
    for name in dir(cls)
    if name.startswith("_") and not name.startswith("__")
}
MAY_OVERRIDE = {name for names in OVERRIDDEN.values() for name in names}
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def trees(root: Path) -> dict[Path, ast.Module]:
    paths = sorted(path for path in root.rglob("*.py") if path.relative_to(root).parts[0] != DOOR)
    return {path.relative_to(root): ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in paths}


def defined(tree: ast.AST) -> Iterator[str]:
    """Private names that our own code gives to functions, classes, variables and attributes of `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Constant(value=str(name)) if name.startswith("_retrograde_"):
                yield name


def is_own_object(node: ast.expr) -> bool:
    """`self`, `cls` or `super()`."""
    match node:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False


def is_foreign(base: ast.expr | None, name: str, ours: set[str]) -> bool:
    """Is a name that is read of `base` somebody else's private one?"""
    if name in OF_THE_INTERPRETER:
        return True
    if not is_private(name) or name in OF_NAMED_TUPLES:
        return False
    if base is not None and is_own_object(base):
        return name not in ours
    return name not in ours or name in OF_TORCH


def names_of_torch(tree: ast.AST) -> set[str]:
    """What a module calls things that it has imported from torch."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def uses(node: ast.AST, ours: set[str]) -> Iterator[str]:
    match node:
        case ast.Attribute(value=base, attr=name) if is_foreign(base, name, ours):
            yield f"uses the private {ast.unparse(node)}"
        case ast.Call(func=function, args=[*_, ast.Constant(value=str(name))]):
            by_name = function.attr if isinstance(function, ast.Attribute) else root_of(function)
            if by_name in BY_NAME and is_foreign(None, name, ours):
                yield f"uses the private {name} by its name"


def changes(node: ast.AST, of_torch: set[str]) -> Iterator[str]:
    match node:
        case ast.Attribute(ctx=ast.Store() | ast.Del()) if root_of(node) in of_torch:
            yield f"changes torch's {ast.unparse(node)}"
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[base, *_]) if root_of(base) in of_torch:
            yield f"changes torch's {ast.unparse(base)}"


def imports(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            imported = [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names):
            imported = [f"{module}.{alias.name}" for alias in names]
        case _:
            return
    for name in imported:
        if any(is_private(part) or part in OF_THE_INTERPRETER for part in name.split(".")):
            yield f"imports the private {name}"


def overrides(node: ast.AST) -> Iterator[str]:
    """What a class defines that torch has under the same private name."""
    if isinstance(node, ast.ClassDef):
        bound = {name for statement in node.body for name in bound_by(statement)}
        yield from (f"overrides torch's private {name}" for name in sorted(bound & OF_TORCH - MAY_OVERRIDE))


def bound_by(statement: ast.stmt) -> set[str]:
    """The names that a statement of a class's body gives to the class."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()


def faults_of(tree: ast.AST, ours: set[str]) -> Iterator[tuple[int, str]]:
    of_torch = names_of_torch(tree)
    for node in ast.walk(tree):
        found = (*uses(node, ours), *changes(node, of_torch), *imports(node), *overrides(node))
        yield from ((getattr(node, "lineno", 0), what) for what in found)


def faults(root: Path) -> list[str]:
    parsed = trees(root)
    ours = {name for tree in parsed.values() for name in defined(tree)}
    return [f"{path}:{line}: {what}" for path, tree in parsed.items() for line, what in sorted(faults_of(tree, ours))]


def test_only_the_door_touches_internals() -> None:
    assert faults(SOURCE) == []


# The rule itself, on small wrong houses: it must be able to fail.
WRONG = [
    "import torch._dynamo",
    "from torch._C import _storage_Use_Count",
    "from torch.distributed.distributed_c10d import _get_process_group_store",
    "from torch.utils import _pytree",
    "import torch\ntask = torch._C",
    "def f(tensor):\n    return tensor._version",
    "def f(tensor):\n    return tensor.untyped_storage()._cdata",
    "def f(node):\n    node._set_sequence_nr(0)",
    "class A:\n    def f(self):\n        return self._parameters",
    "class A:\n    def __init__(self, x):\n        self._version = x._version",
    "import sys\ndef f(thing):\n    return sys.getrefcount(thing)",
    "from sys import getrefcount",
    "def f(function):\n    return function.__closure__",
    "import torch\nset_data = torch.Tensor.data.__set__",
    "from torch.optim import Optimizer\nOptimizer.zero_grad = None",
    "import torch\ntorch.Tensor.neg = None",
    "import torch.nn.init as init\nsetattr(init, 'zeros_', None)",
    "def f(tensor):\n    return getattr(tensor, '_backward_hooks')",
    "import operator\nversion = operator.attrgetter('_version')",
    "from torch import nn\nclass A(nn.Module):\n    def _call_impl(self):\n        pass",
]
RIGHT = [
    "import torch\nfrom torch.autograd.graph import increment_version\ntorch.is_grad_enabled()",
    "class A:\n    def __init__(self):\n        self._own = 1\n\ndef f(a):\n    return a._own",
    "def f(pair):\n    return pair._replace(left=1)._asdict()",
    "from torch import nn\nclass A(nn.Module):\n    def _apply(self, fn):\n        return super()._apply(fn)",
    "import torch\ndef f(tensor):\n    tensor.grad = torch.ones(2)",
    "GIVEN = '_retrograde_given'\ndef f(module):\n    return module._retrograde_given",
    "def f(tensor):\n    return getattr(tensor, '__name__', '')",
]


def house(tmp_path: Path, text: str, room: str = "engine") -> Path:
    (tmp_path / room).mkdir()
    (tmp_path / room / "a.py").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("text", WRONG)
def test_a_way_around_the_door_is_found(tmp_path: Path, text: str) -> None:
    found = faults(house(tmp_path, text))
    assert len(found) == 1, found
    assert found[0].startswith("engine/a.py:")


@pytest.mark.parametrize("text", RIGHT)
def test_what_is_ours_or_public_passes(tmp_path: Path, text: str) -> None:
    assert faults(house(tmp_path, text)) == []


def test_the_door_itself_may(tmp_path: Path) -> None:
    assert faults(house(tmp_path, "import torch._dynamo", DOOR)) == []


def test_what_is_overridden_is_torchs() -> None:
    """Else nobody would call it. (Parameters are marked on the instance's class, by name.)"""
    for cls, names in OVERRIDDEN.items():
        for name in names:
            assert hasattr(cls, name) or name == "_is_param"
