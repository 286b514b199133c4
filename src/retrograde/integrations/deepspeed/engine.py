"""The engine that `initialize()` returns: DeepSpeed's interface over a sharded model.

[Note: what a step is]
A *micro step* ends with a call of `step()`. The one at the *boundary* updates: it clips, steps, zeroes gradients and
moves the schedule; the others only count. Where the boundary is depends on the number of micro steps, or the program
says it (`set_gradient_accumulation_boundary`), or, where accumulation is not managed, it is at every call.

[Note: what is divided]
Gradients of the model's parameters are divided by the number of accumulation steps: once, in every backward that adds
to `.grad`, whoever starts it and wherever it starts (`Engine.gradient_divisor`). Nothing else is: not the gradients of
inputs, nor of parameters that are not the engine's, nor what `torch.autograd.grad` returns.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import retrograde as rg
from retrograde.integrations.deepspeed.checkpoints import (
    Checkpointed,
    Counters,
    Wanted,
    checked_tag,
    latest_in,
    write_weights,
)
from retrograde.integrations.deepspeed.config import BatchSizes, Config
from retrograde.integrations.deepspeed.refusals import ConfigError, wrong


class Scheduler(Protocol):
    """What the engine needs of a learning rate scheduler."""

    def step(self, **kwargs: Any) -> Any: ...


class DeepSpeedEngine(nn.Module):
    """DeepSpeed's engine: `module` is the model, `sharded` its retrograde engine, `optimizer` a torch optimizer.

    Attributes that it does not have itself are those of the model."""

    module: nn.Module

    def __init__(
        self, model: nn.Module, sharded: rg.Engine, optimizer: Optimizer | None, scheduler: Any, config: Config
    ) -> None:
        super().__init__()
        self.module = model
        self.sharded = sharded
        self.optimizer = optimizer
        self.lr_scheduler: Scheduler | None = scheduler
        self._counters = Counters()
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._config = config
        self._boundary: bool | None = None  # as the program has set it; None: by the number of micro steps
        self._updating = False  # inside step()
        self._applied = False  # has the last step() updated?
        self._backwards = 0  # calls of this engine's backward() since the last update
        self._norm: float | None = None
        self._compiled = False
        said = config.loss_scale
        self._scaler = None if said is None else said.scaler(sharded.device)
        self._set_batch(config.batch)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.module(*args, **kwargs)
        return outputs if self._scaler is None else self._scaler.watch(outputs)

    # ---- backwards
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run `loss.backward()`, and return the divided loss. `scale_wrt_gas=False` divides nothing this time."""
        divisor = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        self._backwards += 1
        self.sharded.gradient_divisor = divisor
        try:
            self.scale(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            self.sharded.gradient_divisor = self.gradient_accumulation_steps()
        return loss.detach() / divisor

    def scale(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Scale a loss for a backward by hand: `engine.scale(loss).backward()`. Only fp16 has a scale.

        `retain_graph` has no effect: give it to `backward()`, as in torch."""
        if not isinstance(loss, torch.Tensor):
            raise wrong("loss", loss, "is not a tensor", "what backward() is to start at")
        return loss if self._scaler is None else self._scaler.scaled(loss)

    @property
    def loss_scale(self) -> float:
        """The loss scale; 1 except in fp16."""
        return 1.0 if self._scaler is None else self._scaler.scale

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the backwards inside; the next backward outside, or the step, takes them along.

        At every stage, nested, and around or inside `coalesce_grad_reduction()`."""
        with self.sharded.no_sync():
            yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self, budget: int | str | None = None) -> Iterator[None]:
        """One reduction for all backwards inside, at the end. At every stage, nested, as often in a step as you like.

        `budget`: bytes of unreduced gradients that may wait. As DeepSpeed's does, it leaves the boundary as it found
        it."""
        before = self._boundary
        try:
            with self.sharded.coalesce(budget):
                yield
        finally:
            self._boundary = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients of the model, those that wait in a window too."""
        self.module.zero_grad(set_to_none)

    # ---- steps
    def is_gradient_accumulation_boundary(self) -> bool:
        """Will the `step()` of this micro step update the weights?"""
        if self._boundary is not None:
            return self._boundary
        if not self._config.managed:
            return self._updating
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether this micro step and later ones are at the boundary, until the next call."""
        if not isinstance(is_boundary, bool):
            raise wrong("is_boundary", is_boundary, "is neither true nor false", "True or False")
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro step; at the boundary, update ([Note: what a step is])."""
        if self.optimizer is None:
            raise ConfigError("optimizer: there is none to step; give initialize() one, or the config a section of it")
        self._applied = False
        self._updating = True
        try:
            if self.is_gradient_accumulation_boundary():
                self._update(self.optimizer, lr_kwargs or {})
        finally:
            self._updating = False
        self._counters.micro_steps += 1

    def _update(self, optimizer: Optimizer, lr_kwargs: Mapping[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._scaler is not None:
            self._scaler.unscale(optimizer)
        if self._config.clipping:
            self._norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._config.clipping))
        self._applied = self._step_of(optimizer)
        if not self._config.clipping:
            # Before the step a rank may not have the gradients of ranks that did more backwards; now all have the same.
            grads = [p.grad for p in parameters if p.grad is not None]
            self._norm = float(torch.nn.utils.get_total_norm(grads))
        optimizer.zero_grad()
        if self.lr_scheduler is not None and self._applied:
            self.lr_scheduler.step(**lr_kwargs)
        self._counters.skipped_steps += not self._applied
        self._counters.global_steps += 1
        micro_batches = self._config.batch.accumulation if self._config.managed else self._backwards
        self._counters.global_samples += self._config.batch.micro * self.world_size * micro_batches
        self._backwards = 0

    def _step_of(self, optimizer: Optimizer) -> bool:
        """Step the optimizer. Returns whether it has updated the weights, which it does not after an overflow."""
        if self._scaler is not None:
            return self._scaler.step(optimizer)
        optimizer.step()
        return True

    def was_step_applied(self) -> bool:
        """Has the last `step()` updated the weights?"""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients at the last update, before they were clipped; None before the first."""
        return self._norm

    def get_lr(self) -> list[Any]:
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """The groups' betas or, for optimizers without betas, their momentum."""
        return self._of_groups("betas") or self._of_groups("momentum")

    def _of_groups(self, name: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group[name] for group in groups if name in group]

    # ---- batch sizes
    def _set_batch(self, batch: BatchSizes) -> None:
        self._config = self._config.with_batch(batch)
        self.sharded.gradient_divisor = batch.accumulation

    def train_batch_size(self) -> int:
        return self._config.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._config.batch.micro

    def gradient_accumulation_steps(self) -> int:
        return self._config.batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the train batch size, by another number of accumulation steps."""
        self._set_batch(self._config.batch.with_train(train_batch_size, self.world_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        self._set_batch(self._config.batch.with_micro(micro_batch_size, self.world_size))

    # ---- what the config said
    def zero_optimization_stage(self) -> int:
        return self._config.stage

    def gradient_clipping(self) -> float:
        return self._config.clipping

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return bool(self._config.asked.get("zero_optimization.stage3_gather_16bit_weights_on_model_save"))

    @property
    def device(self) -> torch.device:
        return self.sharded.device

    # ---- compiling
    @property
    def is_compiled(self) -> bool:
        return self._compiled

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: object = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model, once: with `compile: {deepcompile: true}` each unit as a graph of its own (`rg.compile`),
        otherwise by `torch.compile`. `schedule`, which is for DeepCompile's passes, has no effect."""
        if compiled_autograd_enabled:
            raise wrong("compiled_autograd_enabled", True, "is not there", "False, or leave it out")
        if self._compiled:
            return
        options = {**(compile_kwargs or {}), "backend": backend}
        if self._config.compiles_by_units:
            rg.compile(self.module, **options)
        else:
            self.module.compile(**options)
        self._compiled = True

    # ---- what was counted
    @property
    def global_steps(self) -> int:
        """How many micro steps have been at the boundary; updates that an overflow has skipped count too."""
        return self._counters.global_steps

    @property
    def global_samples(self) -> int:
        return self._counters.global_samples

    @property
    def micro_steps(self) -> int:
        return self._counters.micro_steps

    @property
    def skipped_steps(self) -> int:
        return self._counters.skipped_steps

    # ---- the model's state
    def module_state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    @property
    def _checkpointed(self) -> Checkpointed:
        return Checkpointed(self.module, self.optimizer, self.lr_scheduler, self._scaler)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save a checkpoint of `rg.save` in the folder `tag` of `save_dir`. All ranks call it together."""
        if exclude_frozen_parameters:
            raise wrong("exclude_frozen_parameters", True, "is not there", "False, or leave it out")
        name = checked_tag(tag, self.global_steps)
        self._checkpointed.save(save_dir, name, self._counters, client_state or {}, save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Mapping[str, Any]]:
        """Load a checkpoint of `save_checkpoint`, or of DeepSpeed itself; by default the latest. All ranks call it.

        Returns its path, and the client state that was saved with it; None and an empty one if there is none."""
        if custom_load_fn is not None:
            raise wrong("custom_load_fn", custom_load_fn, "is not there", "None, or leave it out")
        path = latest_in(load_dir) if tag is None else Path(load_dir) / checked_tag(tag, 0)
        if path is None:
            return None, {}
        if load_module_only:
            return str(path), self._checkpointed.load(path, Counters(), load_module_strict, Wanted(False, False))
        wanted = Wanted(load_optimizer_states, load_lr_scheduler_states)
        return str(path), self._checkpointed.load(path, self._counters, load_module_strict, wanted)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write all weights, in the dtype in which modules compute, to one file: safetensors if its name ends so,
        otherwise torch's. All ranks call it together."""
        if exclude_frozen_parameters:
            raise wrong("exclude_frozen_parameters", True, "is not there", "False, or leave it out")
        write_weights(self.module, save_dir, save_filename, self._config.precision.page)
        return True

    def destroy(self) -> None:
        """Do nothing: what an engine holds is freed with the model."""
