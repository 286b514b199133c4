"""Divides a model into stages, and makes real only the modules that this rank keeps.

A model is a chain of blocks: an `nn.Sequential` (nested ones are opened), an `nn.ModuleList` or a list of modules.
Each block is called with what the one before returned (a tuple is several arguments) and with those keyword
arguments of the step that its forward accepts.
"""

import copy
import inspect
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from retrograde.arguments import instance, wrong
from retrograde.devices import can_compute, device_of
from retrograde.engine.materialize import Initializer, check_resettable, materialize
from retrograde.errors import PipelineError
from retrograde.layout import Precision
from retrograde.parameters.casting import in_dtype
from retrograde.pipeline.dtypes import AS_THEY_COME, StageCasts
from retrograde.pipeline.partition import balance, cut_before
from retrograde.torch_internals import tree_leaves, tree_map_only, wrapped_module

Model = nn.Module | Sequence[nn.Module]
RUNS = 3


class Chain(nn.Module):
    """The blocks of one stage, called one after the other, with the casts of its arguments and results."""

    def __init__(self, blocks: Sequence[nn.Module], casts: StageCasts = AS_THEY_COME) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._accepted = [_accepted(block) for block in blocks]
        self._casts = casts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = in_dtype(kwargs, self._casts.options)
        return in_dtype(self._compute(in_dtype(args, self._casts.arguments), kwargs), self._casts.results)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result: Any = args
        for block, names in zip(self.blocks, self._accepted, strict=True):
            inputs = result if isinstance(result, tuple) else (result,)
            result = block(*inputs, **{k: v for k, v in kwargs.items() if names is None or k in names})
        return result


def accepted(blocks: Sequence["Block"]) -> list[str] | None:
    """The names of keyword arguments that some block takes, in order; None if any name is taken."""
    return joint([_accepted(block.module) for block in blocks])


def joint(names: Sequence[Collection[str] | None]) -> list[str] | None:
    """All of these names, in order; None if any name is taken somewhere."""
    found: set[str] = set()
    for some in names:
        if some is None:
            return None
        found.update(some)
    return sorted(found)


def _accepted(block: nn.Module) -> frozenset[str] | None:
    """The names of a block's keyword arguments; None if it takes any."""
    parameters = inspect.signature(wrapped_module(block).forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return None
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in keyword)


@dataclass(frozen=True)
class OwnStages:
    """The stages of this rank, by number, if the user has cut the model."""

    modules: Mapping[int, nn.Module]

    @property
    def blocks(self) -> list["Block"]:
        fix = "a dictionary from the number of each stage of this rank to its module"
        instance("stages", self.modules, Mapping, "is not a dictionary", fix, PipelineError)
        for number, module in self.modules.items():
            instance(f"stages[{number!r}]", module, nn.Module, "is not a module", fix, PipelineError)
        return [Block(str(number), self.modules[number]) for number in sorted(self.modules)]

    def by_stage(self, stages: int, mine: Sequence[int]) -> list[list["Block"]]:
        if sorted(self.modules) != sorted(mine):
            raise PipelineError(
                f"stages={sorted(self.modules)} are given, and the schedule has stages {sorted(mine)} on this rank; "
                f"give a module for each of these"
            )
        return [[Block(str(n), self.modules[n])] if n in self.modules else [] for n in range(stages)]


@dataclass(frozen=True)
class Block:
    """A module that is in one stage as a whole, and its name in the model."""

    name: str
    module: nn.Module


def blocks_of(model: Model | OwnStages) -> list[Block]:
    """The blocks of a model in the order of the chain, with their names in the model."""
    if isinstance(model, OwnStages):
        return model.blocks
    if isinstance(model, nn.Sequential):
        return list(_open(model, ""))
    if isinstance(model, nn.ModuleList):
        return [Block(name, module) for name, module in model.named_children()]
    if isinstance(model, Sequence):
        fix = "modules in the order in which they are called"
        for number, block in enumerate(model):
            instance(f"model[{number}]", block, nn.Module, "is not a module", fix, PipelineError)
        return [Block(str(number), block) for number, block in enumerate(model)]
    raise wrong(
        "model",
        model,
        "is not a chain of blocks",
        "an nn.Sequential, an nn.ModuleList or a list of the modules in the order in which they are called",
        PipelineError,
    )


def _open(model: nn.Sequential, prefix: str) -> Iterator[Block]:
    for name, child in model.named_children():
        if isinstance(child, nn.Sequential):
            yield from _open(child, f"{prefix}{name}.")
        else:
            yield Block(prefix + name, child)


def divide(
    blocks: Sequence[Block], stages: int, at: Sequence[str] | None = None, costs: Sequence[float] | None = None
) -> list[list[Block]]:
    """Divide blocks into stages: cut before those named in `at`, or balanced by `costs` (default: parameters)."""
    if at is not None:
        runs = cut_before([block.name for block in blocks], at)
        if len(runs) != stages:
            raise PipelineError(f"cut at {list(at)} makes {len(runs)} stages, the schedule has {stages}")
        return [[blocks[number] for number in run] for run in runs]
    if costs is None:
        costs = [float(sum(p.numel() for p in block.module.parameters())) for block in blocks]
    if len(costs) != len(blocks):
        raise PipelineError(f"costs has {len(costs)} entries for {len(blocks)} blocks: {[b.name for b in blocks]}")
    return [[blocks[number] for number in run] for run in balance(costs, stages)]


def device_of_blocks(blocks: Sequence[Block]) -> torch.device:
    """The device on which this rank's stages are to be."""
    named = [pair for block in blocks for pair in block.module.named_parameters(prefix=block.name)]
    device = device_of(parameter for _, parameter in named)
    for name, parameter in named:
        if parameter.device.type != "meta" and not can_compute(parameter.device):
            raise PipelineError(
                f"parameter {name} is on {parameter.device}, which is neither the CPU nor torch.accelerator's device; "
                f"move the model to one of them, or make it on meta"
            )
        if parameter.device.type != "meta" and parameter.device != device:
            raise PipelineError(
                f"parameter {name} is on {parameter.device} and the model's first one on {device}; a rank's stages are "
                f"on one device: move all of the model there"
            )
    return device


def measured(blocks: Sequence[Block], sample: tuple[Any, ...], options: dict[str, Any]) -> list[float]:
    """Measure how many seconds each block takes for forward and backward of `sample`: the least of a few runs.

    Copies of the blocks are run, so that nothing of the model changes: gradients, statistics, random numbers.
    """
    on_meta = [block.name for block in blocks if any(p.device.type == "meta" for p in block.module.parameters())]
    if on_meta:
        raise PipelineError(f"block {on_meta[0]} is on the meta device and cannot be timed; give costs=... or at=...")
    times = []
    args = sample
    with torch.random.fork_rng(), torch.enable_grad():
        for block in blocks:
            chain = Chain([copy.deepcopy(block.module)])
            runs = [_timed(chain, args, options) for _ in range(RUNS)]
            times.append(min(run.seconds for run in runs))
            args = runs[-1].output
    return times


class _TimedRun(NamedTuple):
    seconds: float
    output: tuple[Any, ...]  # the arguments of the next block


def _timed(chain: Chain, args: tuple[Any, ...], options: dict[str, Any]) -> _TimedRun:
    args = tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), args)
    _wait_for(chain)
    began = time.perf_counter()
    output = chain(*args, **options)
    made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if made:
        torch.autograd.backward(made, [torch.ones_like(leaf) for leaf in made])
    _wait_for(chain)
    seconds = time.perf_counter() - began
    return _TimedRun(seconds, output if isinstance(output, tuple) else (output,))


def _wait_for(chain: Chain) -> None:
    """Wait until a device has done what was issued, since the host only issues."""
    device = device_of(chain.parameters())
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def materialize_stages(
    blocks: Sequence[Block], mine: Collection[nn.Module], device: torch.device, init: Initializer | None
) -> None:
    """Make the modules in `mine` real if they are on the meta device.

    All modules are initialized, one at a time, in the order of their construction, so that with the same seed a model
    has the same values however it is divided. Modules of other ranks stay on the meta device.
    """
    whole = nn.ModuleList(block.module for block in blocks)
    if not any(p.device.type == "meta" for p in whole.parameters()):
        return
    check_resettable(whole, (), init)
    kept = {id(p) for module in mine for p in module.parameters()}

    def take_in(parameter: nn.Parameter, value: torch.Tensor) -> None:
        if id(parameter) in kept:
            made = nn.Parameter(value.detach().to(device), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]

    materialize(whole, device, take_in, init)


@dataclass(frozen=True)
class Tie:
    """A parameter that stages of several ranks use. The first rank adds up the gradients."""

    name: str
    ranks: tuple[int, ...]
    parameter: nn.Parameter


def find_ties(groups: Sequence[Sequence[Block]], placement: Sequence[int]) -> list[Tie]:
    """Find the ties among stages, of which `groups` has the blocks. A tie is called as in the first of its stages."""
    homes: dict[int, list[int]] = {}
    known: dict[int, tuple[str, nn.Parameter]] = {}
    for stage, group in enumerate(groups):
        for block in group:
            for name, parameter in block.module.named_parameters():
                known.setdefault(id(parameter), (f"{block.name}.{name}", parameter))
                ranks = homes.setdefault(id(parameter), [])
                if placement[stage] not in ranks:
                    ranks.append(placement[stage])
    return [Tie(known[key][0], tuple(ranks), known[key][1]) for key, ranks in homes.items() if len(ranks) > 1]


def check_dtypes_of_ties(groups: Sequence[Sequence[Block]], ties: Sequence[Tie], precision: Precision) -> None:
    """Raise unless all stages of a tie have the parameter in one dtype, since its gradient is one sum."""
    uses: dict[int, set[bool]] = {}
    for group in groups:
        for block in group:
            for parameter, kept in _kept(block.module, precision, False):
                uses.setdefault(id(parameter), set()).add(kept)
    for tie in ties:
        if len(uses[id(tie.parameter)]) > 1:
            raise PipelineError(
                f"parameter {tie.name} is used on ranks {list(tie.ranks)}, by a module that precision.keep has and by "
                f"one that it has not; list the classes of both, or of neither"
            )


def _kept(module: nn.Module, precision: Precision, inside: bool) -> Iterator[tuple[nn.Parameter, bool]]:
    """Every use of a parameter, and whether `precision.keep` has the module that uses it or one around that."""
    kept = inside or precision.keeps(module)
    for parameter in module.parameters(recurse=False):
        yield parameter, kept
    for child in module.children():
        yield from _kept(child, precision, kept)
