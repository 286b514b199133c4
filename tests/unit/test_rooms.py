"""The house rules of src/retrograde: who may import whom, what an __init__ holds, how large things get."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.house import SOURCE, house, modules, room_of

# A room imports only rooms of earlier columns, and of its own column itself alone.
COLUMNS = (
    ("errors",),
    ("torch_internals",),
    ("arguments",),
    ("ledger", "labels"),
    ("layout",),
    ("devices",),
    ("transport",),
    ("pages",),
    ("reports",),
    ("gradients",),
    ("coordination",),
    ("parameters",),
    ("compiling",),
    ("engine",),
    ("pipeline",),
    ("checkpoint",),
    ("planning", "tracing"),
    ("integrations", "cli"),
    ("deepspeed", "__main__"),
)
COLUMN = {room: number for number, column in enumerate(COLUMNS) for room in column}

FILE_LINES = 500


class Import(NamedTuple):
    line: int
    module: str  # absolute and dotted; for "from a import b" it is a.b, whether b is a module or a name


def imports(path: Path, root: Path) -> Iterator[Import]:
    """Every import at any depth: inside functions and under TYPE_CHECKING an import is a dependency too."""
    package = (root.name, *path.relative_to(root).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = [*above, *([node.module] if node.module else [])]
            yield from (Import(node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def may_import(here: str, there: str) -> bool:
    if there in COLUMN:
        return COLUMN[there] < COLUMN[here]
    # Anything else is a name of the package's face, and only what is right of the engine's rooms uses it.
    return here in (*COLUMNS[-2], *COLUMNS[-1])


def order_faults(root: Path) -> list[str]:
    faults = []
    for path in modules(root):
        here = room_of(path, root)
        if here == "__init__":
            continue  # the package's own face re-exports from every room
        if here not in COLUMN:
            faults.append(f"{path.relative_to(root)}: room '{here}' has no place in the order")
            continue
        for line, module in imports(path, root):
            top, _, rest = module.partition(".")
            there = rest.partition(".")[0]
            if top != root.name or there == here:
                continue
            if not may_import(here, there):
                faults.append(f"{path.relative_to(root)}:{line}: '{here}' may not import '{module}'")
    return faults


def is_declaration(node: ast.stmt) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")], value=value):
            return isinstance(value, ast.Constant | ast.List | ast.Tuple)
    return False


def init_faults(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{node.lineno}: an __init__ holds a docstring, imports and __all__ only"
        for path in modules(root)
        if path.name == "__init__.py"
        for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body
        if not is_declaration(node)
    ]


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def size_faults(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: {count} lines, at most {FILE_LINES}"
        for path in modules(root)
        if (count := line_count(path)) > FILE_LINES
    ]


def layout_faults(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{line}: layout is arithmetic and does not import '{module}'"
        for path in modules(root)
        if room_of(path, root) == "layout"
        for line, module in imports(path, root)
        if (module + ".").startswith("torch.distributed.")
    ]


def face_faults(root: Path) -> list[str]:
    """Front ends use the package's public face: `import retrograde as rg`, and modules of their own room."""
    return [
        f"{path.relative_to(root)}:{line}: a front end uses the package's face, not '{module}'"
        for path in modules(root)
        if room_of(path, root) == "integrations"
        for line, module in imports(path, root)
        if module.startswith(f"{root.name}.") and not module.startswith(f"{root.name}.integrations.")
    ]


# Rooms that may name the host's memory themselves: they own it, carry its bytes, try torch there, or read files.
KNOW_THE_HOST = ("devices", "transport", "torch_internals", "checkpoint")


def place_faults(root: Path) -> list[str]:
    """`device="cpu"` and the like: elsewhere the device is that of the streams, or `devices.HOST`."""
    return [
        f"{path.relative_to(root)}:{node.lineno}: a device is not named here"
        for path in modules(root)
        if room_of(path, root) not in KNOW_THE_HOST
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if isinstance(node, ast.Call)
        for given in (*node.args, *(keyword.value for keyword in node.keywords))
        if isinstance(given, ast.Constant) and given.value == "cpu"
    ]


# `Any` that crosses rooms all the same, by room or by name, and why.
OF_USERS = "what users give, of which nothing is known before it is looked at"
OF_TORCH = "torch's own: it has no narrower type there"
ANY_ROOMS = {"arguments": OF_USERS, "torch_internals": OF_TORCH, "integrations": OF_USERS}
ANY_NAMES = {
    "CastAround.around": OF_USERS,
    "Engine.__init__": "the memo of copy.deepcopy",
    "Engine.load_state_dict": OF_TORCH,
    "Engine.state_dict": OF_TORCH,
    "Pipeline.evaluate": OF_USERS,
    "Pipeline.run": OF_USERS,
    "Pipeline.step": OF_USERS,
    "ShardedParameter.register_hook": OF_TORCH,
    "ShardedParameter.register_post_accumulate_grad_hook": OF_TORCH,
    "ShardedTensor.detach_": OF_TORCH,
    "ShardedTensor.set_": OF_TORCH,
    "Watched.numpy": OF_TORCH,
    "merged_groups": OF_TORCH,
    "numbered_state": OF_TORCH,
}
CALLED_FROM_OUTSIDE = ("__init__", "__call__", "__enter__", "__exit__")


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def crossing(root: Path) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Functions and classes that a room has of another one, by where they are made."""
    made: dict[str, ast.FunctionDef | ast.ClassDef] = {}
    shown: dict[str, str] = {}  # by an __init__
    for path in modules(root):
        for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                made[f"{module_of(path, root)}.{node.name}"] = node
            elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py" and node.module is not None:
                shown |= {f"{module_of(path, root)}.{each.name}": f"{node.module}.{each.name}" for each in node.names}
    found = {}
    for path in modules(root):
        here = room_of(path, root)
        for _, name in imports(path, root):
            origin = shown.get(name, name)
            if here != "__init__" and origin in made and origin.split(".")[1] != here:
                found[origin] = made[origin]
    return found


def signatures(node: ast.FunctionDef | ast.ClassDef) -> Iterator[tuple[str, list[ast.expr | None]]]:
    """Of a function, or of what a class shows: its methods and fields."""
    if isinstance(node, ast.FunctionDef):
        given = node.args
        each = (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
        yield node.name, [node.returns, *(arg.annotation for arg in each if arg is not None)]
        return
    for inside in node.body:
        if isinstance(inside, ast.FunctionDef):
            if not inside.name.startswith("_") or inside.name in CALLED_FROM_OUTSIDE:
                yield from ((f"{node.name}.{name}", types) for name, types in signatures(inside))
        elif isinstance(inside, ast.AnnAssign) and not ast.unparse(inside.target).startswith("_"):
            yield f"{node.name}.{ast.unparse(inside.target)}", [inside.annotation]


def has_any(annotation: ast.expr | None) -> bool:
    inside = () if annotation is None else ast.walk(annotation)
    return any(isinstance(each, ast.Name) and each.id == "Any" for each in inside)


def any_faults(root: Path) -> list[tuple[str, str]]:
    """Rooms and names of what has `Any` in a signature that another room sees."""
    return sorted(
        {
            (origin.split(".")[1], name)
            for origin, node in crossing(root).items()
            for name, types in signatures(node)
            if any(map(has_any, types))
        }
    )


def test_source_is_there() -> None:
    assert (SOURCE / "__init__.py").is_file()


def test_rooms_import_to_the_left_only() -> None:
    assert order_faults(SOURCE) == []


def test_init_files_hold_no_logic() -> None:
    assert init_faults(SOURCE) == []


def test_files_stay_small() -> None:
    assert size_faults(SOURCE) == []


def test_layout_has_no_collectives() -> None:
    assert layout_faults(SOURCE) == []


def test_front_ends_use_the_public_face() -> None:
    assert face_faults(SOURCE) == []


def test_devices_are_not_named_in_the_middle() -> None:
    assert place_faults(SOURCE) == []


def test_no_any_between_rooms() -> None:
    found = any_faults(SOURCE)
    assert [name for room, name in found if room not in ANY_ROOMS and name not in ANY_NAMES] == []
    assert {name for room, name in found if room not in ANY_ROOMS} == set(ANY_NAMES)
    assert {room for room, _ in found} >= set(ANY_ROOMS)


# The rules themselves, on small wrong houses: each check must be able to fail.


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("layout/flat.py", "from retrograde.transport import Transport"),
        ("layout/flat.py", "import retrograde.transport.protocol"),
        ("layout/flat.py", "from ..transport.protocol import Transport"),
        ("layout/flat.py", "from .. import transport"),
        ("layout/deep/flat.py", "from ...engine import Engine"),
        ("transport/torch.py", "def late():\n    from retrograde.engine import Engine"),
        ("transport/torch.py", "if TYPE_CHECKING:\n    from retrograde.gradients import Bucket"),
        ("pages/page.py", "from retrograde.gradients import Bucket"),
        ("errors.py", "from retrograde.ledger import Ledger"),
        ("engine/api.py", "import retrograde"),
        ("engine/api.py", "from retrograde import shard"),
        ("cli/main.py", "from retrograde.integrations import deepspeed"),
        ("attic/old.py", "import torch"),
    ],
)
def test_wrong_imports_are_found(tmp_path: Path, file: str, text: str) -> None:
    assert len(order_faults(house(tmp_path, {file: text}))) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("__init__.py", "from retrograde.engine import Engine"),
        ("engine/api.py", "from retrograde.layout import flat\nfrom .core import C\nfrom ..errors import E"),
        ("engine/__init__.py", "from .api import shard\nfrom retrograde.engine.core import Core"),
        ("gradients/bucket.py", "import torch.distributed\nfrom retrograde.transport.protocol import Transport"),
        ("integrations/hf.py", "from retrograde.engine import Engine\nfrom retrograde import planning"),
        ("cli/main.py", "import retrograde as rg\nfrom retrograde import shard"),
    ],
)
def test_right_imports_pass(tmp_path: Path, file: str, text: str) -> None:
    assert order_faults(house(tmp_path, {file: text})) == []


@pytest.mark.parametrize("text", ["def f(): ...", "x = 1", "__all__ = make()", "if True:\n    import torch", "print()"])
def test_logic_in_an_init_is_found(tmp_path: Path, text: str) -> None:
    faults = init_faults(house(tmp_path, {"transport/__init__.py": f'"""Doc."""\nimport torch\n{text}\n'}))
    assert [fault.split(" ")[0] for fault in faults] == ["transport/__init__.py:3:"]


def test_a_plain_init_passes(tmp_path: Path) -> None:
    text = '"""Doc."""\nfrom .api import shard\n__all__ = ["shard"]\n__version__ = "0.1.0"\n'
    assert init_faults(house(tmp_path, {"__init__.py": text})) == []


def test_sizes_are_counted(tmp_path: Path) -> None:
    full = "pass\n" * FILE_LINES
    assert size_faults(house(tmp_path, {"engine/a.py": full, "pipeline/b.py": full})) == []
    assert size_faults(house(tmp_path, {"engine/a.py": full + "pass\n"})) == ["engine/a.py: 501 lines, at most 500"]


def test_collectives_in_layout_are_found(tmp_path: Path) -> None:
    text = "import torch.distributed as dist\nfrom torch import distributed\nimport torch\n"
    assert len(layout_faults(house(tmp_path, {"layout/flat.py": text}))) == 2


def test_front_ends_that_reach_inside_are_found(tmp_path: Path) -> None:
    inside = (
        "import retrograde as rg\nfrom retrograde.integrations.other import x\nfrom retrograde.engine import Engine\n"
    )
    root = house(tmp_path, {"integrations/other/a.py": inside})
    assert [fault.split(" ")[0] for fault in face_faults(root)] == ["integrations/other/a.py:3:"]


def test_named_devices_are_found(tmp_path: Path) -> None:
    text = 'a = torch.device("cpu")\nb = x.to("cpu")\nc = torch.empty(1, device="cpu")\nd = x.type == "cpu"\n'
    found = place_faults(house(tmp_path, {"pages/a.py": text, "devices/b.py": text}))
    assert [fault.split(" ")[0] for fault in found] == [f"pages/a.py:{line}:" for line in (1, 2, 3)]


def test_any_between_rooms_is_found(tmp_path: Path) -> None:
    text = (
        "def given(x: Any) -> int: ...\ndef got() -> list[Any]: ...\ndef apart(x: Any) -> None: ...\n"
        "class Seen:\n    field: dict[str, Any]\n    _own: Any\n    def ask(self, *, x: Any = 1): ...\n"
        "    def _inside(self, x: Any): ...\n    def fine(self, x: int) -> int: ...\n"
    )
    shown = "from retrograde.layout.flat import got, Seen\n"
    uses = "from retrograde.layout import Seen, got\nfrom retrograde.layout.flat import given\n"
    beside = "from retrograde.layout.flat import apart\n"
    files = {"layout/flat.py": text, "layout/__init__.py": shown, "pages/page.py": uses, "layout/grid.py": beside}
    names = [name for _, name in any_faults(house(tmp_path, files))]
    assert names == ["Seen.ask", "Seen.field", "given", "got"]
