"""Trains a case: a few steps, on a rank of a sharded model or on plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.live import live_bytes
from tests.meshes import mesh_of
from tests.patterns.context import Context, EngineContext, NaturalContext
from tests.patterns.registry import Case
from tests.patterns.trace import Trace
from tests.reference import Grads

PLAIN = 0  # the "stage" of plain torch


def build(case: Case) -> nn.Module:
    torch.manual_seed(7)
    return case.spec.build()


def seed_phase(rank: int, step: int, phase: int) -> None:
    torch.manual_seed(100 * step + 10 * rank + phase)


def optimizers(case: Case, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """One per scope."""
    chosen = {}
    for scope in {phase.scope for phase in case.phases}:
        chosen[scope] = case.optimizer([p for name, p in model.named_parameters() if name.startswith(scope)])
    return chosen


def snapshot(tensors: Mapping[str, Tensor | None]) -> Any:
    return {name: None if value is None else value.detach().clone() for name, value in tensors.items()}


class Player:
    """One rank's model, its engines and optimizers."""

    def __init__(self, case: Case, rank: int, world: int, stage: int, **options: Any) -> None:
        """`options`: of `shard()`, besides the case's own."""
        self.case = case
        self.model = build(case)
        early = optimizers(case, self.model) if case.optimizer_first else None
        self.engines: dict[str, Any] = {}
        self.context: Context
        if stage == PLAIN:
            self.context = NaturalContext(case.spec, self.model)
        else:
            self._shard(stage, world, options)
            self.context = EngineContext(case.spec, rank, world, self.model, list(self.engines.values()))
        if case.setup is not None:
            case.setup(self.model, self.context)
        if case.leaf_hook is not None:
            for leaf in self.model.parameters():
                leaf.register_post_accumulate_grad_hook(case.leaf_hook)
        self.optimizers = early or optimizers(case, self.model)
        self.context.optimizers = list(self.optimizers.values())

    def _shard(self, stage: int, world: int, options: dict[str, Any]) -> None:
        import retrograde as rg

        mesh = mesh_of(self.case.replicas(world), world)
        given = {"mesh": mesh, "timeout": 15.0, "offload": self.case.offload} | options
        for name in self.case.sharded:
            given["precision"] = self.case.precision
            given["whole"] = self.case.whole
            self.engines[name] = rg.shard(self.model.get_submodule(name), stage=stage, **given)

    def play(self) -> Trace:
        grads: list[Grads] = []
        held: list[int] = []
        for step in range(self.case.steps):
            self.context.step = step
            for index in range(len(self.case.phases)):
                grads.append(self._phase(step, index))
            if self.engines and step >= self.case.steps - 2:
                mine = [t for step_grads in grads for t in step_grads.values()]
                mine += [value for _, value in self.context.records]
                held.append(self._quiet_bytes() - sum(_nbytes(value) for value in mine))
        leftovers = [f"saved-tensor hooks {hooks}"] if (hooks := _default_hooks()) else []
        if held and held[-1] > held[-2] + self._slack():
            leftovers.append(f"{held[-1] - held[-2]} bytes more than after the step before")
        return Trace(grads, self._state(), self.context.records, leftovers)

    def _phase(self, step: int, index: int) -> Grads:
        phase = self.case.phases[index]
        seed_phase(self.context.rank, step, index)
        phase.run(self.model, self.case.spec.batch(self.context.rank, step), self.context)
        if self.case.edit is not None:
            self.case.edit(self.model, self.context)
        if self.case.optimizer_steps:
            self.case.take_step(self.optimizers[phase.scope])
        grads = self._grads()
        if self.case.after is not None:
            self.case.after(self.model, self.context)
        if not self.case.keep_grads:
            self.model.zero_grad()
        return grads

    def _grads(self) -> Grads:
        """After the step, so that it is the step itself that has to finish what is still in flight."""
        whole: dict[str, Tensor | None] = {}
        for prefix, engine in self.engines.items():
            whole |= {f"{prefix}.{name}" if prefix else name: grad for name, grad in engine.full_grads().items()}
        plain = {name: p.grad for name, p in self.model.named_parameters() if name not in whole}
        grads = whole | plain
        return snapshot({name: grads[name] for name, _ in self.model.named_parameters()})

    def _quiet_bytes(self) -> int:
        """`live_bytes()` while no rank does anything: one that is ahead would already be sending.

        Threads keep the last message they got, so one full of gradients is followed by a small one."""
        for prefix, engine in self.engines.items():
            name, _ = next(self.model.get_submodule(prefix).named_parameters())
            engine.full_grad(name)
        dist.barrier()
        held = live_bytes()
        dist.barrier()
        return held

    def _slack(self) -> int:
        """What that small message holds if gradients are kept over steps."""
        return next(self.model.parameters()).nbytes * self.context.world if self.case.keep_grads else 0

    def _state(self) -> dict[str, Tensor]:
        state = {}
        for name in self.engines or ("",):
            part = self.model.get_submodule(name).state_dict()
            state.update({f"{name}.{key}" if name else key: value for key, value in part.items()})
        return snapshot(state)


def _nbytes(value: Any) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0


def _default_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def play_rank(rank: int, world: int, case_id: str, stage: int, **options: Any) -> Trace:
    """A task for the pool. With two ranks all gradients that wait may do so where they are, with others none: the
    parameters of these models are small."""
    from tests.patterns.rows import CASES
    from tests.thresholds import kept  # with retrograde, which the oracle does without

    player = Player(CASES[case_id], rank, world, stage, **options)
    with kept(1 if world == 2 else 2**40):
        trace = player.play()
    dist.barrier()  # a rank that drops its model takes its shards along, and others may still be reading
    return trace
