"""What is assumed of torch and Python: every probe passes here, and fails by name where its assumption is broken."""

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from retrograde import torch_internals
from retrograde.cli import doctor, main
from retrograde.errors import InternalsChanged, RetrogradeError
from retrograde.torch_internals import (
    backward,
    checked,
    checkpoints,
    constructors,
    functions,
    groups,
    memory,
    modules,
    probes,
    process_end,
    tensors,
    training,
    trees,
    wrapping,
)
from retrograde.torch_internals.probes import PROBES, FailedProbe, Probe, When, check, describe, expect, find
from tests.unit.marks import between_marks

ROOT = Path(__file__).parents[2]
QUICK = [probe for probe in PROBES if probe.when is not When.DOCTOR]
SLOW = [probe for probe in PROBES if probe.when is When.DOCTOR]


def named(name: str) -> Probe:
    return next(probe for probe in PROBES if probe.name == name)


def python(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, input=given, capture_output=True, text=True, timeout=110)


# ---- the assumptions hold here
@pytest.mark.parametrize("probe", QUICK, ids=lambda probe: probe.name)
def test_every_assumption_holds(probe: Probe) -> None:
    assert probe.failure() is None


def test_the_doctor_finds_that_all_hold() -> None:
    """In a process of its own: the slow ones import Dynamo and make a process group."""
    done = python("-m", "retrograde", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"all {len(PROBES)} assumptions hold" in done.stdout
    assert "failed" not in done.stdout


def test_probes_hold_in_other_moods_of_torch() -> None:
    with torch.inference_mode(), torch.device("meta"):
        assert [(probe.name, probe.failure()) for probe in QUICK if probe.failure() is not None] == []


# ---- each is noticed where it is broken
Break = Callable[[pytest.MonkeyPatch], None]


def becomes(where: Any, name: str, value: Any) -> Break:
    return lambda patch: patch.setattr(where, name, value, raising=False)


class MadeOtherwise:
    """A wrapper whose constructor is not asked."""

    def __new__(cls, module: nn.Module) -> Any:
        return object()

    def __init__(self, module: nn.Module) -> None: ...


def plainly(roots: Any, *args: Any, **kwargs: Any) -> None:
    torch.autograd.backward(roots)


def no_write_no_alias(overload: Any) -> list[Any]:
    return [SimpleNamespace(alias_info=None, type="Tensor")]


BROKEN: dict[str, list[Break]] = {
    "the number of a backward": [
        becomes(backward, "current_backward", lambda: 7),
        becomes(backward, "current_backward", find("torch._C:_no_such_name")),
    ],
    "the end of a backward": [becomes(backward, "at_end_of_backward", lambda call: call())],
    "what a backward will run": [
        becomes(backward, "_executes", lambda node: True),
        becomes(backward, "_executes", lambda node: False),
    ],
    "the order of a backward": [
        becomes(backward, "run_as_soon_as_ready", lambda node: None),
        becomes(backward, "run_after_all_else", lambda node: None),
    ],
    "hooks of saved tensors": [
        becomes(backward, "top_saved_tensor_hooks", lambda: None),
        becomes(backward, "_why_forbidden", lambda: None),
    ],
    "a backward under a mode": [becomes(backward, "_run", plainly)],
    "the node of a Function": [becomes(backward, "node_class", lambda function: object)],
    "what tensors are made of": [becomes(constructors, "_asking", lambda original, cls, may_return: original)],
    "what collectives are given": [becomes(groups.dist, "all_reduce", lambda tensor: None)],
    "the file of a tensor": [becomes(checkpoints, "_STORAGES", {})],
    "the identity of memory": [becomes(memory, "storage_id", id), becomes(memory, "storage_id", lambda tensor: 1)],
    "users of memory": [becomes(memory, "_users", lambda number: 2), becomes(memory, "_ASKING", 0)],
    "who has a gradient": [
        becomes(memory, "_references", lambda tensor: 1),
        becomes(memory, "_owners", lambda tensor: 1),
        becomes(memory, "_holders_of_base", lambda view: memory._Holders(0, 0)),
    ],
    "references to a tensor": [
        becomes(memory, "_references", lambda tensor: 2),  # Python counts otherwise
        becomes(memory, "_owners", lambda tensor: 1),  # torch does
        becomes(memory, "_ALONE", memory._ALONE + 1),  # one that is held passes for alone
        becomes(memory, "_ALONE", memory._ALONE - 1),  # one that is alone passes for held
    ],
    "the version of a tensor": [becomes(memory, "version_of", lambda tensor: 0)],
    "views and what they are of": [becomes(memory, "unsafe_view", lambda tensor, shape: tensor.view(shape))],
    "tables of a module": [becomes(modules, "own_parameters", lambda module: dict(module.named_parameters()))],
    "how modules are reset": [becomes(modules, "_RESETS", ("reset_parameters",))],
    "weights of recurrent modules": [becomes(modules, "ReadsWeightsAnew", type("Nothing", (), {}))],
    "methods that torch calls of a module": [
        becomes(nn.Module, "state_dict", lambda self: {}),
        becomes(nn.Module, "load_state_dict", lambda self, state, assign: None),
        becomes(nn.Module, "to", lambda self, dtype: self),
    ],
    "tensors that count as parameters": [becomes(type(nn.Parameter), "__instancecheck__", type.__instancecheck__)],
    "other memory for a tensor": [
        becomes(tensors, "set_data", lambda tensor, data: None),
        becomes(tensors, "set_data", lambda tensor, data: tensor.detach_().set_(data)),
    ],
    "a new node for a leaf": [becomes(tensors, "forget_accumulator", lambda leaf: None)],
    "attributes behind a subclass": [becomes(tensors, "raw_grad", lambda leaf: leaf.grad)],
    "tensors of a class of ours": [
        becomes(tensors, "make_subclass", lambda cls, data: data.detach().clone().as_subclass(cls)),
        becomes(tensors, "make_subclass", lambda cls, data: data.data.as_subclass(cls)),
    ],
    "switches of torch functions": [
        becomes(tensors, name, contextlib.nullcontext)
        for name in ("without_torch_function", "with_torch_function", "without_modes_or_torch_function")
    ],
    "a class without torch functions": [becomes(tensors, "NO_TORCH_FUNCTION", torch.Tensor.__torch_function__)],
    "hooks of a leaf": [becomes(tensors, "has_hooks", lambda tensor: False)],
    "schemas of torch's functions": [
        becomes(tensors, "returns_of", no_write_no_alias),
        becomes(torch.ops.aten, "mul", None),
    ],
    "transforms of torch.func": [
        becomes(tensors, "_outside", contextlib.nullcontext),
        becomes(tensors, "_top_transform", lambda: None),
    ],
    "functions behind functions": [
        becomes(functions, "body_of", lambda function: function),
        becomes(functions, "grouped_mm", torch.mm),
    ],
    "casts in a graph": [
        becomes(functions, "_CAST", "CastBackward0"),
        becomes(functions, "what_was_cast", lambda tensor: None),
    ],
    "where autocast shares its casts": [
        becomes(functions, "autocast_region", lambda device: object()),
        becomes(functions, "autocast_region", lambda device: None),
    ],
    "what ends a process": [becomes(process_end.multiprocessing.process.BaseProcess, "run", lambda self: None)],
    "how gradients are clipped": [becomes(training.clip_grad, "clip_grad_norm_", lambda parameters, most: None)],
    "gradients that are clipped together": [becomes(training, "_taken_together", list)],
    "who zeroes gradients": [
        becomes(torch.optim.SGD, "zero_grad", lambda self: None),
        becomes(nn.Linear, "zero_grad", lambda self: None),
    ],
    "who saves optimizer states": [
        becomes(torch.optim.SGD, "state_dict", lambda self: {}),
        becomes(torch.optim.SGD, "load_state_dict", lambda self, state: None),
    ],
    "what an optimizer does between its hooks": [
        becomes(training, "_HOOKED", None),
        becomes(training, "original_of", lambda step: step),
    ],
    "norms of many tensors": [becomes(tensors, "norms_of", lambda many, order, dtype: [many[0].norm(), many[0].sum()])],
    "trees of containers": [
        becomes(trees, "tree_leaves", lambda tree: [tree]),
        becomes(trees, "is_named_tuple", lambda kind: False),
    ],
    "how DDP is made": [becomes(wrapping, "DistributedDataParallel", MadeOtherwise)],
    "how parametrizations are made": [
        becomes(nn.utils.parametrize, "register_parametrization", lambda module, name, made: None)
    ],
    "what vmap is given": [becomes(torch.func, "vmap", lambda function: function)],
    "what derivatives are given": [becomes(torch.func, "grad", lambda function: function)],
}
CASES = [(name, number) for name, breaks in BROKEN.items() for number in range(len(breaks))]


@pytest.fixture
def nothing_measured() -> Iterator[None]:
    """What is measured once in a process is not measured while something is broken, nor kept from then."""
    measurements = (memory._holders_of_a_lone_base, memory._holders_of_a_lone_one)
    for each in measurements:
        each.cache_clear()
    yield
    for each in measurements:
        each.cache_clear()


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_broken_assumption_is_found(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch, nothing_measured: None
) -> None:
    probe = named(name)
    BROKEN[name][number](monkeypatch)
    assert probe.failure() is not None
    with pytest.raises(InternalsChanged, match=re.escape(f"- {name}: {probe.assumption}")):
        check(probe.when)


def test_every_quick_probe_is_seen_to_fail() -> None:
    assert sorted(BROKEN) == sorted(probe.name for probe in QUICK)


BREAK_THE_SLOW_ONES = """
import contextlib, types
from unittest import mock
import torch
from retrograde.torch_internals import backends, backward, checkpoints, compiler, groups, modules, training, wrapping
from retrograde.torch_internals.probes import PROBES, When

handle = types.SimpleNamespace(remove=lambda: None)
broken = {
    "frames that are compiled": (compiler, "_frame_callback", lambda: None),
    "what is not traced": (compiler, "ending_graphs", lambda reason: lambda function: function),
    "the backends of torch.compile": (backends, "_wrapped", lambda *arguments: len),
    "what compiled graphs keep": (backends, "READS_DATA", object()),
    "the life of a process group": (groups, "before_group_shutdown", lambda call: None),
    "hooks of optimizer states": (
        torch.optim.Optimizer, "register_state_dict_post_hook", lambda self, hook, prepend: handle
    ),
    "the metadata of checkpoints": (checkpoints, "_CLASSES", set()),
    "tensors that are saved in chunks": (checkpoints.SavedInChunks, "__create_chunk_list__", lambda self: []),
    "modules around another": (modules, "_WRAPPERS", {}),
    "how FSDP is made": (wrapping, "_FSDP", "torch.elsewhere"),
    "whether a profiler records": (backward, "profiling", lambda: False),
    "what forward derivatives are given": (torch.func, "jvp", lambda *arguments: None),
}
for probe in PROBES:
    if probe.when is When.DOCTOR:
        where, name, value = broken[probe.name]
        with mock.patch.object(where, name, value):
            first = probe.failure()
        print(probe.name, "|", first is not None, "|", probe.failure())
"""


def test_a_broken_assumption_is_found_by_the_doctor() -> None:
    done = python("-c", BREAK_THE_SLOW_ONES)
    assert done.stdout.splitlines() == [f"{probe.name} | True | None" for probe in SLOW], done.stderr


# ---- at import
HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "sympy")
IMPORTS = {
    "as it is": f"import retrograde\nprint([name for name in {HEAVY!r} if name in sys.modules])",
    "another version": "torch.__version__ = '2.99.0'\nimport retrograde",
    "gone": "del torch._C._storage_Use_Count\nimport retrograde",
    "constant": "torch._C._storage_Use_Count = lambda number: 1\nimport retrograde",
    "no counts": "sys.getrefcount = lambda thing: 2\nimport retrograde",
    "no batches": "torch._functorch.vmap._add_batch_dim = None\nimport retrograde",
    "first shard": """
import retrograde as rg
from retrograde.torch_internals import backward
backward.run_after_all_else = lambda node: None
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rg.shard(torch.nn.Linear(2, 2))
""",
}
# Importing torch takes seconds: it is done once, and each script runs in a fork.
EACH_IN_A_FORK = """
import json, os, sys, tempfile, torch, torch._functorch.vmap, torch.distributed as dist
done = {}
for label, script in json.load(sys.stdin).items():
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            exec(script)
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        done[label] = [code, *texts]
print(json.dumps(done))
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def imports() -> dict[str, Done]:
    done = python("-c", EACH_IN_A_FORK, given=json.dumps(IMPORTS))
    assert done.returncode == 0, done.stderr
    return {label: Done(*rest) for label, rest in json.loads(done.stdout).items()}


@pytest.mark.parametrize(
    ("label", "name", "found"),
    [
        ("gone", "users of memory", f"torch {torch.__version__} has no torch._C._storage_Use_Count"),
        ("constant", "users of memory", "the number of users of a tensor, a view and an alias is 1, not 3"),
        ("no counts", "references to a tensor", "whether a tensor is held that a variable has is False, not True"),
        ("no batches", "what vmap is given", "'NoneType' object is not callable"),
    ],
)
def test_import_fails_by_name(imports: dict[str, Done], label: str, name: str, found: str) -> None:
    done = imports[label]
    assert done.code == 1
    told = done.err[done.err.index("retrograde.errors.InternalsChanged: ") :]
    version = ".".join(map(str, sys.version_info[:3]))
    assert f"torch {torch.__version__} on Python {version} is built otherwise than retrograde assumes" in told
    assert f"- {name}: {named(name).assumption} Found: {found}" in told
    assert named(name).needed_for in told
    assert "Install torch 2.13" in told


def test_another_version_is_told_in_one_line(imports: dict[str, Done]) -> None:
    held = sum(probe.when is When.IMPORT for probe in PROBES)
    line = (
        f"retrograde is tested with torch 2.13, not with 2.99.0: all {held} probes at import passed; run `retrograde "
        f"doctor` for the others\n"
    )
    assert imports["another version"] == (0, "", line)


def test_import_is_cheap_and_silent(imports: dict[str, Done]) -> None:
    """Counted, not timed: few probes, and none of what takes seconds."""
    assert sum(probe.when is When.IMPORT for probe in PROBES) == 34
    assert imports["as it is"] == (0, "[]\n", "")


def test_what_needs_a_backward_is_probed_by_the_first_shard(imports: dict[str, Done]) -> None:
    done = imports["first shard"]
    assert done.code == 1
    assert "InternalsChanged: " in done.err
    assert "- the order of a backward: " in done.err


def test_import_runs_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 4: torch would start threads for it."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a backward was run")

    for where in (torch.autograd, torch.autograd.graph):
        monkeypatch.setattr(where, "_engine_run_backward", refuse)
    monkeypatch.setattr(backward, "_run", refuse)
    assert check(When.IMPORT) == 34
    with pytest.raises(InternalsChanged, match="a backward was run"):
        check(When.FIRST_USE)


# ---- probes leave nothing behind
def test_probes_leave_torch_as_it_was() -> None:
    def state() -> list[Any]:
        collectives = groups.collectives
        cells = [training._cell_of(each).cell_contents for each in _clipping()]
        return [
            *cells,
            collectives._check_single_tensor,
            collectives._check_tensor_list,
            list(training._taken_together()),
            vars(wrapping.DistributedDataParallel)["__init__"],
            vars(wrapping.ParametrizationList)["__init__"],
            wrapping._vmap()._add_batch_dim,
            wrapping._transforms()._wrap_for_grad,
            wrapping._forward()._make_dual_impl,
            backward.top_saved_tensor_hooks(),
            torch.get_rng_state().tolist(),
        ]

    before = state()
    check(When.IMPORT)
    check(When.FIRST_USE)
    assert state() == before


def _clipping() -> tuple[Any, Any]:
    return training.clip_grad.clip_grad_norm_, training.clip_grad.clip_grad_value_


# ---- the registry
def test_every_name_has_a_probe() -> None:
    covered = {name for probe in PROBES for name in probe.covers}
    not_internals = {"PrefixStore", "Store", "TCPStore", "check_before_first_use"}
    assert set(torch_internals.__all__) - covered == not_internals


def test_probes_cover_names_that_exist() -> None:
    inside = (torch_internals, *checked.WITH_PROBES)
    for probe in PROBES:
        for name in probe.covers:
            lazy = name == "end_graph_here"  # it would import Dynamo
            assert lazy or any(hasattr(module, name) for module in inside), name


def test_all_modules_with_probes_are_imported() -> None:
    folder = Path(torch_internals.__file__).parent
    with_probes = {path.stem for path in folder.glob("*.py") if "@probe(" in path.read_text(encoding="utf-8")}
    assert {module.__name__.rpartition(".")[2] for module in checked.WITH_PROBES} == with_probes


def test_names_are_told_apart() -> None:
    names = [probe.name for probe in PROBES]
    assert len(set(names)) == len(names)


def test_a_probe_must_say_what_it_assumes() -> None:
    def silent() -> None:
        """Looks at something."""

    with pytest.raises(ValueError, match="silent does not say what it assumes"):
        probes.probe("a name", needed_for="x", otherwise="y")(silent)


def test_a_fault_is_described_with_the_way_out() -> None:
    probe = named("users of memory")
    text = describe([FailedProbe(probe, "nothing")])
    assert f"- users of memory: {probe.assumption} Found: nothing. Needed for {probe.needed_for}; otherwise " in text
    assert f"otherwise {probe.otherwise}." in text
    assert issubclass(InternalsChanged, RetrogradeError)


# ---- the doctor
def broken_probe() -> None:
    expect(1, 2, "the number")


def test_the_doctor_fails_if_one_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = named("users of memory")
    bad = Probe("a thing", (), "it is so.", "all else", "a crash", When.DOCTOR, broken_probe)
    monkeypatch.setattr(doctor, "PROBES", [bad, good])
    assert main(["doctor"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("ok users of memory dropping a page") for line in lines)
    assert "failed a thing all else" in lines
    assert "- a thing: it is so. Found: the number is 1, not 2. Needed for all else; otherwise a crash." in lines


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """If not: `python -m retrograde doctor --markdown` prints what belongs between the marks."""
    assert main(["doctor", "--markdown"]) == 0
    assert between_marks("design/internals.md", "assumptions") == capsys.readouterr().out


def test_the_docstring_is_the_assumption() -> None:
    folder = Path(torch_internals.__file__).parent
    said = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text is not None and text.startswith("Assumes: "):
                said.add(" ".join(text.removeprefix("Assumes: ").split()))
    assert said == {probe.assumption for probe in PROBES}


def test_a_torch_that_does_not_ask_for_chunks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the tensor for a plain one: the probe says so."""
    (chunks,) = [probe for probe in PROBES if "SavedInChunks" in probe.covers]
    assert chunks.failure() is None
    for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"):
        with monkeypatch.context() as without:
            without.delattr(torch_internals.SavedInChunks, name)
            assert chunks.failure() is not None, name
