"""The table of routes: its rows, and the page that shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import get_testing_overrides

from retrograde.cli import main
from retrograde.pages import edits
from retrograde.parameters.handlers import HANDLERS
from retrograde.parameters.routes import Route, row
from tests.unit.marks import between_marks

ROWS = {
    Route.MEMORY: ("data_ptr", "is_complex", "requires_grad_", "new_zeros", "untyped_storage"),
    Route.SHAPE: ("size", "numel", "__len__", "stride", "is_same_size"),
    Route.ELEMENTS: ("mul", "__rsub__", "absolute", "where", "isfinite", "clone", "__invert__", "lerp", "__rand__"),
    Route.LIKE: ("zeros_like", "empty_like"),
    Route.DRAWN: ("normal_", "rand_like"),
    Route.RESHAPED: ("view", "detach", "flatten"),
    Route.REDUCED: ("norm", "sum", "any", "linalg_vector_norm"),
    Route.WHOLE: ("matmul", "topk", "std", "t", "item", "cat", "svd_lowrank", "__rmatmul__", "dropout", "nobody_knows"),
    Route.EDIT: ("mul_", "__iadd__", "copy_", "clamp_", "zero_", "gt_"),
    Route.EDIT_WHOLE: ("cumsum_", "index_add_", "__setitem__", "tril_", "addmm_"),
    Route.LISTS: ("_foreach_add", "_foreach_mul_"),
    Route.REDUCED_LISTS: ("_foreach_norm",),
    Route.GRADIENTS: ("grad",),
    Route.REFUSED: ("t_", "resize_", "set_"),
}


@pytest.mark.parametrize("route", ROWS, ids=lambda route: route.name)
def test_rows(route: Route) -> None:
    assert {name: row(name) for name in ROWS[route]} == dict.fromkeys(ROWS[route], route)


# ---- all that torch lets a subclass of Tensor serve
def functions() -> set[str]:
    return {func.__name__ for func in get_testing_overrides()} - {"__get__"}


def schemas(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name, None)
    known = isinstance(packet, torch._ops.OpOverloadPacket)
    return [getattr(packet, overload) for overload in packet.overloads()] if known else []


# One of their forms is not pointwise, or what they return is not a tensor.
NOT_ONLY_POINTWISE = {"max": Route.REDUCED, "min": Route.REDUCED, "equal": Route.WHOLE}
# What they return is the object itself, or one with the same meaning.
RETURN_THEMSELVES = {"detach_", "requires_grad_", "share_memory_", "retain_grad", "__deepcopy__", "module_load"}
# torch has no schema of these, and none returns a tensor.
ABOUT_THE_OBJECT = {"__dlpack_device__", "__reduce_ex__", "__repr__", "__setstate__", "_is_view", "backward"}
ABOUT_THE_OBJECT |= {"register_hook", "register_post_accumulate_grad_hook", "_clear_non_serializable_cached_data"}
ABOUT_MEMORY = {"data_ptr", "const_data_ptr", "is_shared", "storage", "storage_type", "untyped_storage"}
ABOUT_MEMORY |= {"record_stream"}


def test_what_torch_says_is_pointwise_is_done_on_pieces() -> None:
    tagged = {name for name in functions() if any(torch.Tag.pointwise in each.tags for each in schemas(name))}
    found = {name: row(name) for name in tagged if row(name) not in (Route.ELEMENTS, Route.EDIT)}
    assert found == NOT_ONLY_POINTWISE
    assert {name for name in tagged if row(name) is Route.EDIT} == {name for name in tagged if edits(name)}
    assert len(tagged) > 200


def test_no_tensor_comes_from_this_ranks_memory_alone() -> None:
    memory = {name for name in functions() if row(name) is Route.MEMORY}
    returned = {
        name: [str(each.type) for schema in schemas(name) for each in schema._schema.returns] for name in memory
    }
    tensors = {name for name, types in returned.items() if not types or any("Tensor" in each for each in types)}
    assert tensors - ABOUT_MEMORY - ABOUT_THE_OBJECT <= RETURN_THEMSELVES


def test_every_route_has_a_handler() -> None:
    assert set(HANDLERS) == set(Route)


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """If not: `python -m retrograde routes --markdown` prints what belongs between the marks."""
    assert main(["routes", "--markdown"]) == 0
    assert between_marks("design/leaves.md", "routes") == capsys.readouterr().out


def test_one_function_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["routes", "norm", "add_"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["norm", "REDUCED"] and any(line.split()[:2] == ["add_", "EDIT"] for line in lines)
    assert main(["routes", "nobody_knows"]) == 2
    assert "no function or method 'nobody_knows'" in capsys.readouterr().err
