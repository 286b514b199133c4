"""The engines compared. Each takes the same model and makes a `Training` of it.

All use fused AdamW and their documented way of wrapping a transformer; none is slowed by debug flags.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import meters
from benchmarks.model import GPT, Workload

Step = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Training:
    step: Step
    # The engine's own totals of what it exchanged so far, for one that does not use collectives.
    exchanges: Callable[[], dict[str, int]] = dict
    # Bytes so far, for one that does not use sockets.
    sent: Callable[[], int] = meters.bytes_sent


Setup = Callable[[GPT, Workload], Training]


@dataclass(frozen=True)
class Contender:
    name: str
    setup: Setup
    package: str = "torch"  # imported before memory is first read, so that it counts as the base
    install: str = ""
    compiled: bool = False

    def missing(self) -> str | None:
        """Why this contender cannot run here, or None."""
        if self.compiled and not shutil.which("g++"):
            return "inductor needs a C++ compiler, and there is no g++ here"
        if importlib.util.find_spec(self.package) is not None:
            return None
        return f"{self.package} is not installed" + (f" ({self.install})" if self.install else "")


def _adamw(model: nn.Module, work: Workload) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=work.lr, fused=True)


def _torch_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> float:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _alone(model: GPT, work: Workload) -> Training:
    """The limit: what every rank would do if nothing had to be communicated."""
    return Training(_torch_step(model, _adamw(model, work)))


def _alone_bf16(model: GPT, work: Workload) -> Training:
    """The limit in bf16: no masters."""
    model.to(torch.bfloat16)
    return _alone(model, work)


def _ddp(model: GPT, work: Workload) -> Training:
    from torch.nn.parallel import DistributedDataParallel

    return Training(_torch_step(DistributedDataParallel(model), _adamw(model, work)))


def _ddp_compiled(model: GPT, work: Workload) -> Training:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)
    wrapped.compile()
    return Training(_torch_step(wrapped, _adamw(model, work)))


def _ddp_zero(model: GPT, work: Workload) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=work.lr, fused=True)
    return Training(_torch_step(wrapped, optimizer))


def fully_shard_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], reshard: bool, device: str = "cpu", bf16: bool = False
) -> None:
    """Each block is a unit, and what is left is the root's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    # None is torch's default: every unit but the root, which backward needs at once, drops its weights.
    policy = None if reshard else False
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=policy, mp_policy=precision)
    fully_shard(model, mesh=mesh, reshard_after_forward=policy, mp_policy=precision)


def _fsdp2(reshard: bool, compiled: bool = False, bf16: bool = False) -> Setup:
    def setup(model: GPT, work: Workload) -> Training:
        if compiled:
            for block in model.blocks:
                block.compile()  # block by block, as torchtitan does
        fully_shard_blocks(model, model.blocks, reshard, bf16=bf16)
        return Training(_torch_step(model, _adamw(model, work)))

    return setup


def _deepspeed(stage: int, bf16: bool = False) -> Setup:
    def setup(model: GPT, work: Workload) -> Training:
        import deepspeed

        # Its shared-memory operator would leave a segment per rank in /dev/shm.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": work.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # the default of 1.0 would be work that nobody else does
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
            "zero_allow_untested_optimizer": True,  # fused AdamW under masters
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model, work), config=config)

        def step(tokens: Tensor, targets: Tensor) -> float:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            return float(loss.detach())

        return Training(step)

    return setup


def _retrograde(stage: int, compiled: bool = False, transport: str = "auto", bf16: bool = False) -> Setup:
    def setup(model: GPT, work: Workload) -> Training:
        import retrograde as rg

        patience = _PATIENCE if compiled else 60.0
        precision = rg.Precision(param="bf16", reduce="fp32") if bf16 else None
        ledger = rg.shard(model, stage=stage, timeout=patience, transport=transport, precision=precision).ledger
        if compiled:
            rg.compile(model)

        def exchanges() -> dict[str, int]:
            return {kind: ledger.count(kind) for kind in ("gather", "reduce", "join", "agree")}

        def moved() -> int:
            """What a rank reads of others' shards, and hands over of gradients: within a host by shared memory."""
            return int(ledger.bytes("gather") + ledger.bytes("reduce"))

        step = _torch_step(model, _adamw(model, work))
        return Training(step) if transport == "collective" else Training(step, exchanges, moved)

    return setup


_PATIENCE = 300.0  # seconds one rank may compile while the other waits
_PIP_DEEPSPEED = "pip install --no-build-isolation deepspeed==0.19.8"

_PEERS = (
    Contender("ddp", _ddp),
    Contender("ddp-zero", _ddp_zero),
    Contender("fsdp2", _fsdp2(reshard=False)),
    Contender("fsdp2-reshard", _fsdp2(reshard=True)),
    *(Contender(f"deepspeed-{n}", _deepspeed(n), "deepspeed", _PIP_DEEPSPEED) for n in (1, 2, 3)),
)
_OURS = tuple(Contender(f"retrograde-{stage}", _retrograde(stage), "retrograde") for stage in (1, 2, 3))
_OURS_OVER_GLOO = tuple(
    Contender(f"retrograde-{stage}-gloo", _retrograde(stage, transport="collective"), "retrograde")
    for stage in (1, 2, 3)
)

# Who is compared with whom. Those of one field are alive together and take turns, as many as memory has room for.
FIELDS: dict[str, tuple[Contender, ...]] = {
    "fp32": (Contender("alone", _alone), *_OURS, *_OURS_OVER_GLOO, *_PEERS),
    "compiled": (
        Contender("alone", _alone),
        Contender("retrograde-3-compiled", _retrograde(3, compiled=True), "retrograde", compiled=True),
        Contender("ddp-compiled", _ddp_compiled, compiled=True),
        Contender("fsdp2-reshard-compiled", _fsdp2(reshard=True, compiled=True), compiled=True),
    ),
    "bf16": (
        Contender("alone-bf16", _alone_bf16),
        *(Contender(f"retrograde-{n}-bf16", _retrograde(n, bf16=True), "retrograde") for n in (2, 3)),
        Contender("fsdp2-bf16", _fsdp2(reshard=False, bf16=True)),
        Contender("fsdp2-reshard-bf16", _fsdp2(reshard=True, bf16=True)),
        *(Contender(f"deepspeed-{n}-bf16", _deepspeed(n, True), "deepspeed", _PIP_DEEPSPEED) for n in (2, 3)),
    ),
}
CONTENDERS: dict[str, Contender] = {each.name: each for field in FIELDS.values() for each in field}
