"""The table: DeepSpeed's words, its config keys and its calls, and what became of each.

A key that is not here is refused, as is a value of another type. To make a key of `Standing.NOT_YET` work, give it
another standing here, and read it in config.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

from retrograde.integrations.deepspeed.refusals import ConfigError, not_yet, wrong


class Standing(Enum):
    """What becomes of a key of DeepSpeed's config."""

    USED = "used"
    WITHOUT_EFFECT = "no effect"  # accepted, and listed once in the log
    NOT_YET = "refused for now"  # unless its value says that it is not wanted


class Kind(Enum):
    """What values a key of DeepSpeed's config takes."""

    BOOL = "true or false"
    WHOLE = "a whole number, 0 or more"
    NUMBER = "a number, 0 or more"
    TEXT = "a text"
    SECTION = "a section (a dictionary)"
    ANYTHING = "anything"


@dataclass(frozen=True)
class Word:
    """A key of DeepSpeed's config, and what becomes of it here."""

    key: str
    kind: Kind
    standing: Standing
    became: str
    switch: str = ""  # if the key is a section: the key inside that says whether it is wanted
    off: tuple[Any, ...] = (None, False, 0, "none", "None")  # values that say that it is not wanted

    def wanted(self, value: Any) -> bool:
        if self.switch and isinstance(value, Mapping):
            return value.get(self.switch) not in self.off
        return value not in self.off

    @property
    def named(self) -> str:
        """The key that turns the feature on."""
        return f"{self.key}.{self.switch}" if self.switch else self.key


def _used(key: str, kind: Kind, became: str) -> Word:
    return Word(key, kind, Standing.USED, became)


def _idle(key: str, kind: Kind, became: str) -> Word:
    return Word(key, kind, Standing.WITHOUT_EFFECT, became)


def _not_yet(key: str, kind: Kind, what: str, switch: str = "") -> Word:
    return Word(key, kind, Standing.NOT_YET, what, switch)


_UNITS = "a unit is its own bucket: nothing is split or filled up to a size"
_SAME = "one flat buffer for each unit, always"
_OVERLAP = "gradients are sent while backward goes on, always; nothing waits before its end"
_WATCHING = "only says what happens: see `engine.sharded.report()` and torch's profiler"
_PINNED = "what crosses lies in pinned memory, always"
_NO_DISK = "nothing is offloaded to disks"
_NARROW_MASTERS = "a master that is not fp32"
_BF16 = "bf16."
_FP16 = "fp16."
_RESIDENT = "part of the resident budget, with the elements' size: `rg.shard(resident=...)`"
_ZERO = "zero_optimization."
_OFFLOAD = _ZERO + "offload_"

WORDS: tuple[Word, ...] = (
    # ---- batches and steps
    _used("train_batch_size", Kind.WHOLE, "micro batch × accumulation × ranks; what is missing is computed"),
    _used("train_micro_batch_size_per_gpu", Kind.WHOLE, "the batch size of `training_data`'s loader"),
    _used("gradient_accumulation_steps", Kind.WHOLE, "`step()` updates every so many calls; `gradient_divisor`"),
    _used("managed_gradient_accumulation", Kind.BOOL, "false: every `step()` updates"),
    _used("gradient_clipping", Kind.NUMBER, "`torch.nn.utils.clip_grad_norm_` before the update"),
    _used("gradient_allreduce_op", Kind.TEXT, '`rg.shard(reduce="mean" or "sum")`, at every stage'),
    _used("communication_data_type", Kind.TEXT, "`rg.Precision(reduce=...)`: added up in fp32 all the same"),
    _used("optimizer", Kind.SECTION, "torch's optimizer of that name; Adam and AdamW with DeepSpeed's defaults"),
    _used("scheduler", Kind.SECTION, "DeepSpeed's five schedules, as a torch scheduler"),
    _used("dataloader_drop_last", Kind.BOOL, "`drop_last` of `training_data`'s loader"),
    _idle("prescale_gradients", Kind.BOOL, "sums are in fp32 and divided once"),
    _idle("gradient_predivide_factor", Kind.NUMBER, "sums are in fp32 and divided once"),
    _idle("sparse_gradients", Kind.BOOL, "they become dense, with the same values"),
    _idle("disable_allgather", Kind.BOOL, "there is no all-gather to choose"),
    _idle("zero_allow_untested_optimizer", Kind.BOOL, "every optimizer that is written in torch's functions works"),
    _idle("zero_force_ds_cpu_optimizer", Kind.BOOL, "optimizers are torch's"),
    _idle("graph_harvesting", Kind.BOOL, "about CUDA graphs"),
    _idle("seq_parallel_communication_data_type", Kind.TEXT, "there is no sequence parallelism"),
    _idle("use_data_before_expert_parallelism", Kind.BOOL, "there is no expert parallelism"),
    # ---- ZeRO
    _used(_ZERO + "stage", Kind.WHOLE, "`rg.shard(stage=...)`; 0 is 1: the same numbers, less memory"),
    _used(_ZERO + "stage3_max_live_parameters", Kind.WHOLE, _RESIDENT),
    _used(_ZERO + "stage3_max_reuse_distance", Kind.WHOLE, "the smaller of the two counts"),
    _used(_ZERO + "stage3_param_persistence_threshold", Kind.WHOLE, "parameters up to it: " + _RESIDENT),
    _used(_ZERO + "stage3_model_persistence_threshold", Kind.WHOLE, "bounds the one before"),
    _used(_ZERO + "stage3_prefetch_bucket_size", Kind.WHOLE, "0: `rg.shard(prefetch=False)`; else the next page"),
    _idle(_ZERO + "contiguous_gradients", Kind.BOOL, _SAME),
    _idle(_ZERO + "overlap_comm", Kind.BOOL, _OVERLAP),
    _idle(_ZERO + "reduce_scatter", Kind.BOOL, "each rank gets its shard's sum and nothing else, always"),
    _idle(_ZERO + "reduce_bucket_size", Kind.WHOLE, _UNITS),
    _idle(_ZERO + "allgather_bucket_size", Kind.WHOLE, _UNITS),
    _idle(_ZERO + "allgather_partitions", Kind.BOOL, "pages are read one by one, under the next forward"),
    _idle(_ZERO + "use_multi_rank_bucket_allreduce", Kind.BOOL, _UNITS),
    _idle(_ZERO + "sub_group_size", Kind.WHOLE, "the optimizer works on this rank's elements, parameter by parameter"),
    _idle(_ZERO + "round_robin_gradients", Kind.BOOL, "shards are equal slices"),
    _idle(_ZERO + "ignore_unused_parameters", Kind.BOOL, "unused parameters keep `grad = None`, always"),
    _idle(_ZERO + "legacy_stage1", Kind.BOOL, "there is one stage 1"),
    _idle(_ZERO + "stage3_module_granularity_threshold", Kind.WHOLE, "units are repeated blocks"),
    _idle(_ZERO + "leaf_module", Kind.SECTION, "ranks may use other modules than their peers, without being told"),
    _idle(_ZERO + "stage3_use_all_reduce_for_fetch_params", Kind.BOOL, "pages are read straight into place"),
    _idle(_ZERO + "stage3_allgather_sequential", Kind.BOOL, "pages are read straight into place"),
    _idle(_ZERO + "memory_efficient_linear", Kind.BOOL, "autograd saves handles instead of weights, always"),
    _idle(_ZERO + "override_module_apply", Kind.BOOL, "`module.apply()` works as it is"),
    _idle(_ZERO + "log_trace_cache_warnings", Kind.BOOL, _WATCHING),
    _idle(_ZERO + "enable_sanity_checks", Kind.BOOL, "checks are always on"),
    _idle(_ZERO + "load_from_fp32_weights", Kind.BOOL, "where there are masters they are saved and loaded, always"),
    _idle(_ZERO + "elastic_checkpoint", Kind.BOOL, "see `save_checkpoint`"),
    _idle(_ZERO + "pipeline_loading_checkpoint", Kind.BOOL, "see `save_checkpoint`"),
    _idle(_ZERO + "stage3_gather_16bit_weights_on_model_save", Kind.BOOL, "see `save_16bit_model`"),
    _idle(_ZERO + "stage3_gather_fp16_weights_on_model_save", Kind.BOOL, "see `save_16bit_model`"),
    _idle(_ZERO + "save_muon_momentum_buffer_in_memory", Kind.BOOL, "nothing leaves memory"),
    _idle(_ZERO + "cpu_offload_use_pin_memory", Kind.BOOL, _PINNED),
    _idle(_ZERO + "zero_hpz_partition_size", Kind.WHOLE, "how pages are read, not what is computed"),
    _idle(_ZERO + "mics_hierarchical_params_gather", Kind.BOOL, "how pages are read, not what is computed"),
    _used(_OFFLOAD + "optimizer.device", Kind.TEXT, '"cpu": `rg.shard(offload="optimizer")`; "nvme" is refused'),
    _used(_OFFLOAD + "param.device", Kind.TEXT, '"cpu": `rg.shard(offload="parameters")`; "nvme" is refused'),
    _idle(_OFFLOAD + "optimizer.pin_memory", Kind.BOOL, _PINNED),
    _idle(_OFFLOAD + "param.pin_memory", Kind.BOOL, _PINNED),
    _idle(_OFFLOAD + "optimizer.nvme_path", Kind.TEXT, _NO_DISK),
    _idle(_OFFLOAD + "param.nvme_path", Kind.TEXT, _NO_DISK),
    _idle(_OFFLOAD + "optimizer.buffer_count", Kind.WHOLE, _NO_DISK),
    _idle(_OFFLOAD + "param.buffer_count", Kind.WHOLE, _NO_DISK),
    _idle(_OFFLOAD + "param.buffer_size", Kind.WHOLE, _NO_DISK),
    _idle(_OFFLOAD + "param.max_in_cpu", Kind.WHOLE, _NO_DISK),
    _idle(_OFFLOAD + "optimizer.pipeline_read", Kind.BOOL, _NO_DISK),
    _idle(_OFFLOAD + "optimizer.pipeline_write", Kind.BOOL, _NO_DISK),
    _idle(_OFFLOAD + "optimizer.fast_init", Kind.BOOL, _NO_DISK),
    Word(_OFFLOAD + "optimizer.ratio", Kind.NUMBER, Standing.NOT_YET, "offload of a part", off=(None, 1)),
    _not_yet(_OFFLOAD + "optimizer.super_offload", Kind.BOOL, "an update beside the backward"),
    _idle(_OFFLOAD + "optimizer.cpuadam_cores_perc", Kind.NUMBER, "optimizers are torch's"),
    _used(_ZERO + "cpu_offload", Kind.BOOL, 'true: `rg.shard(offload="optimizer")`'),
    _used(_ZERO + "cpu_offload_param", Kind.BOOL, 'true: `rg.shard(offload="parameters")`'),
    _not_yet(_ZERO + "zenflow", Kind.SECTION, "an update beside the backward"),
    _not_yet(_ZERO + "zero_quantized_weights", Kind.BOOL, "quantization"),
    _not_yet(_ZERO + "zero_quantized_nontrainable_weights", Kind.BOOL, "quantization"),
    _not_yet(_ZERO + "zero_quantized_gradients", Kind.BOOL, "quantization"),
    _not_yet(_ZERO + "zeropp_loco_param", Kind.SECTION, "quantization"),
    Word(_ZERO + "mics_shard_size", Kind.ANYTHING, Standing.NOT_YET, "replicas by config", off=(None, -1, 0)),
    # ---- precision
    _used(_BF16 + "enabled", Kind.BOOL, '`rg.Precision(param="bf16")`, with fp32 masters'),
    _idle(_BF16 + "immediate_grad_update", Kind.BOOL, "masters have their gradients when the backward ends, always"),
    _idle(_BF16 + "check_grad_overflow", Kind.BOOL, "bf16 has the range of fp32"),
    _not_yet(_BF16 + "bf16_master_weights_and_grads", Kind.BOOL, _NARROW_MASTERS),
    _not_yet(_BF16 + "bf16_optimizer_states", Kind.BOOL, _NARROW_MASTERS),
    _used(_FP16 + "enabled", Kind.BOOL, '`rg.Precision(param="fp16")`, with fp32 masters and torch\'s `GradScaler`'),
    _used(_FP16 + "loss_scale", Kind.NUMBER, "a scale that stays; 0: one that follows overflows"),
    _used(_FP16 + "initial_scale_power", Kind.WHOLE, "the first scale is 2 to the power of it"),
    _used(_FP16 + "loss_scale_window", Kind.WHOLE, "updates without an overflow until the scale is doubled"),
    _idle(_FP16 + "hysteresis", Kind.WHOLE, "an overflow halves the scale, as in torch"),
    _idle(_FP16 + "consecutive_hysteresis", Kind.BOOL, "an overflow halves the scale, as in torch"),
    _used(_FP16 + "min_loss_scale", Kind.NUMBER, "the scale goes no lower"),
    _idle(_FP16 + "auto_cast", Kind.BOOL, "the model's arguments are cast, always"),
    _not_yet(_FP16 + "fp16_master_weights_and_grads", Kind.BOOL, _NARROW_MASTERS),
    _not_yet("amp", Kind.SECTION, "apex", "enabled"),
    _not_yet("torch_autocast", Kind.SECTION, "autocast by config", "enabled"),
    _used("data_types.grad_accum_dtype", Kind.TEXT, "`rg.Precision(accumulate=...)`, in windows and at stage 1"),
    Word("data_types.param_dtype", Kind.TEXT, Standing.NOT_YET, "a dtype besides bf16 and fp16", off=(None, "fp32")),
    Word("data_types.buffer_dtype", Kind.TEXT, Standing.NOT_YET, "casting of buffers", off=(None, "fp32")),
    # ---- compiling
    _used("compile.deepcompile", Kind.BOOL, "`engine.compile()` compiles by units (`rg.compile`)"),
    _idle("compile.free_activation", Kind.BOOL, "what lives, and when, follows autograd"),
    _idle("compile.offload_activation", Kind.BOOL, "what lives, and when, follows autograd"),
    _idle("compile.offload_opt_states", Kind.BOOL, "what lives, and when, follows autograd"),
    _idle("compile.double_buffer", Kind.BOOL, "the next page is read ahead"),
    _idle("compile.symmetric_memory", Kind.BOOL, "about CUDA"),
    _idle("compile.debug_log", Kind.BOOL, _WATCHING),
    _idle("compile.offload_parameters", Kind.BOOL, "what lives, and when, follows autograd"),
    _idle("compile.sync_before_reduce", Kind.BOOL, _OVERLAP),
    _idle("compile.sync_after_reduce", Kind.BOOL, _OVERLAP),
    _idle("compile.sync_before_allgather", Kind.BOOL, _OVERLAP),
    _idle("compile.sync_after_allgather", Kind.BOOL, _OVERLAP),
    _idle("compile.keep_int_input_tensors", Kind.BOOL, "about DeepCompile's passes"),
    _idle("compile.keep_all_input_tensors", Kind.BOOL, "about DeepCompile's passes"),
    # ---- what only watches
    _idle("steps_per_print", Kind.ANYTHING, _WATCHING),
    _idle("wall_clock_breakdown", Kind.BOOL, _WATCHING),
    _idle("memory_breakdown", Kind.BOOL, _WATCHING),
    _idle("dump_state", Kind.BOOL, _WATCHING),
    _idle("flops_profiler", Kind.SECTION, _WATCHING),
    _idle("comms_logger", Kind.SECTION, _WATCHING),
    _idle("timers", Kind.SECTION, _WATCHING),
    _idle("tensorboard", Kind.SECTION, _WATCHING),
    _idle("wandb", Kind.SECTION, _WATCHING),
    _idle("csv_monitor", Kind.SECTION, _WATCHING),
    _idle("comet", Kind.SECTION, _WATCHING),
    _idle("log_level", Kind.ANYTHING, _WATCHING),
    # ---- others
    _idle("activation_checkpointing", Kind.SECTION, "`torch.utils.checkpoint`, of either kind, works as it is"),
    _idle("aio", Kind.SECTION, _NO_DISK),
    _idle("checkpoint", Kind.SECTION, "see `save_checkpoint`"),
    _idle("nebula", Kind.SECTION, "see `save_checkpoint`"),
    _idle("pipeline", Kind.SECTION, "pipelines are `rg.Pipeline`"),
    _not_yet("elasticity", Kind.SECTION, "elastic training", "enabled"),
    _not_yet("autotuning", Kind.SECTION, "autotuning", "enabled"),
    _not_yet("hybrid_engine", Kind.SECTION, "the hybrid engine", "enabled"),
    _not_yet("tensor_parallel", Kind.SECTION, "tensor parallelism by config", "autotp_size"),
    _not_yet("expert_parallel", Kind.SECTION, "expert parallelism", "enabled"),
    Word("sequence_parallel_size", Kind.WHOLE, Standing.NOT_YET, "sequence parallelism", off=(None, 0, 1)),
    _idle("data_parallel_size", Kind.WHOLE, "all ranks of the process group"),
    _not_yet("sparse_attention", Kind.SECTION, "sparse attention"),
    _not_yet("curriculum_learning", Kind.SECTION, "a curriculum", "enabled"),
    _not_yet("data_efficiency", Kind.SECTION, "a curriculum", "enabled"),
    _not_yet("progressive_layer_drop", Kind.SECTION, "layer drop", "enabled"),
    _not_yet("eigenvalue", Kind.SECTION, "eigenvalues", "enabled"),
    _not_yet("quantize_training", Kind.SECTION, "quantization", "enabled"),
    _not_yet("compression_training", Kind.SECTION, "compression"),
    _not_yet("weight_quantization", Kind.SECTION, "quantization"),
)

# Older names, and those that DeepSpeed's own classes have.
SYNONYMS = {
    "bfloat16": "bf16",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    _ZERO + "max_live_parameters": _ZERO + "stage3_max_live_parameters",
    _ZERO + "max_reuse_distance": _ZERO + "stage3_max_reuse_distance",
    _ZERO + "param_persistence_threshold": _ZERO + "stage3_param_persistence_threshold",
    _ZERO + "model_persistence_threshold": _ZERO + "stage3_model_persistence_threshold",
    _ZERO + "prefetch_bucket_size": _ZERO + "stage3_prefetch_bucket_size",
    _ZERO + "module_granularity_threshold": _ZERO + "stage3_module_granularity_threshold",
    _ZERO + "gather_16bit_weights_on_model_save": _ZERO + "stage3_gather_16bit_weights_on_model_save",
    _ZERO + "use_all_reduce_for_fetch_params": _ZERO + "stage3_use_all_reduce_for_fetch_params",
    _ZERO + "allgather_sequential": _ZERO + "stage3_allgather_sequential",
}

# What arguments of `initialize()` are refused with: the name, what is missing, the way out.
MISSING: dict[str, tuple[str, str]] = {
    "mpu": ("model parallelism by mpu", "leave it out: ranks are those of the default process group"),
    "mesh_param": ("sequence parallelism", "leave it out"),
}


@dataclass(frozen=True)
class TheirCall:
    """A call of DeepSpeed's, as programs write it, and the same without its words."""

    name: str  # of the engine's method or attribute; of what is in a module, with it: `zero.Init`
    theirs: str
    ours: str


_COUNTED = "count by yourself"

CALLS: tuple[TheirCall, ...] = (
    # ---- backwards and steps
    TheirCall("backward", "engine.backward(loss, retain_graph=True)", "`loss.backward(retain_graph=True)`"),
    TheirCall("scale", "engine.scale(loss).backward()", "`loss.backward()`; in fp16 `scaler.scale(loss).backward()`"),
    TheirCall("loss_scale", "engine.loss_scale", "`scaler.get_scale()`, of torch's `GradScaler`"),
    TheirCall("no_sync", "with engine.no_sync():", "`with engine.no_sync():`"),
    TheirCall("coalesce_grad_reduction", "with engine.coalesce_grad_reduction():", "`with engine.coalesce():`"),
    TheirCall("zero_grad", "engine.zero_grad()", "`model.zero_grad()`"),
    TheirCall("step", "engine.step()", "`opt.step(); opt.zero_grad()`"),
    TheirCall("was_step_applied", "engine.was_step_applied()", "known where you step"),
    TheirCall("get_global_grad_norm", "engine.get_global_grad_norm()", "what `torch.nn.utils.clip_grad_norm_` returns"),
    # ---- accumulation
    TheirCall("gradient_accumulation_steps", "engine.gradient_accumulation_steps()", "`engine.gradient_divisor`"),
    TheirCall(
        "is_gradient_accumulation_boundary", "engine.is_gradient_accumulation_boundary()", "known where you step"
    ),
    TheirCall("set_gradient_accumulation_boundary", "engine.set_gradient_accumulation_boundary(True)", "step there"),
    TheirCall("train_batch_size", "engine.train_batch_size()", "your loader's, times accumulation and ranks"),
    TheirCall("train_micro_batch_size_per_gpu", "engine.train_micro_batch_size_per_gpu()", "your loader's"),
    TheirCall("set_train_batch_size", "engine.set_train_batch_size(64)", "`engine.gradient_divisor = 64 // ...`"),
    TheirCall("set_train_micro_batch_size", "engine.set_train_micro_batch_size(4)", "another loader"),
    # ---- whole parameters
    TheirCall("zero.Init", "with zero.Init():", '`with torch.device("meta"):` for a model that does not fit'),
    TheirCall(
        "zero.GatheredParameters",
        "with zero.GatheredParameters(params, modifier_rank=0):",
        "`with engine.full_params(module, writer=0):`",
    ),
    TheirCall(
        "zero.GatheredParameters",
        "with zero.GatheredParameters(params):",
        "`with engine.full_params(module, leaves=True):`, or `module.weight`, which is whole",
    ),
    TheirCall("utils.safe_get_full_grad", "utils.safe_get_full_grad(p)", "`p.grad.full_tensor()`"),
    TheirCall("utils.safe_get_full_fp32_param", "utils.safe_get_full_fp32_param(p)", "`p.full_tensor()`"),
    TheirCall(
        "utils.safe_set_full_fp32_param",
        "utils.safe_set_full_fp32_param(p, value)",
        "`p.copy_(value)` under `torch.no_grad()`",
    ),
    TheirCall(
        "utils.safe_get_full_optimizer_state",
        'utils.safe_get_full_optimizer_state(p, "exp_avg")',
        '`opt.state[p]["exp_avg"].full_tensor()`',
    ),
    # ---- compiling, files
    TheirCall("compile", "engine.compile()", "`rg.compile(model)` by units, `model.compile()` without `deepcompile`"),
    TheirCall("is_compiled", "engine.is_compiled", "known where you compile"),
    TheirCall(
        "save_checkpoint",
        "engine.save_checkpoint(path, tag, client_state)",
        '`rg.save(f"{path}/{tag}", model, opt, extra=...)`',
    ),
    TheirCall("load_checkpoint", "engine.load_checkpoint(path)", "`rg.load(path, model, opt, extra=...)`"),
    TheirCall("save_16bit_model", "engine.save_16bit_model(path)", "`rg.export(path, model, dtype=torch.bfloat16)`"),
    TheirCall("module_state_dict", "engine.module_state_dict()", "`model.state_dict()`"),
    # ---- what is asked
    TheirCall("get_lr", "engine.get_lr()", '`[group["lr"] for group in opt.param_groups]`'),
    TheirCall("get_mom", "engine.get_mom()", '`[group["betas"] for group in opt.param_groups]`'),
    TheirCall("device", "engine.device", "`engine.device`"),
    TheirCall("zero_optimization_stage", "engine.zero_optimization_stage()", "what you gave `rg.shard(stage=...)`"),
    TheirCall("gradient_clipping", "engine.gradient_clipping()", "what you clip to"),
    TheirCall(
        "zero_gather_16bit_weights_on_model_save",
        "engine.zero_gather_16bit_weights_on_model_save()",
        "what the config said; `rg.export` needs no leave",
    ),
    TheirCall("global_steps", "engine.global_steps", _COUNTED),
    TheirCall("global_samples", "engine.global_samples", _COUNTED),
    TheirCall("micro_steps", "engine.micro_steps", _COUNTED),
    TheirCall("skipped_steps", "engine.skipped_steps", _COUNTED),
    TheirCall("destroy", "engine.destroy()", "nothing: what an engine holds goes with the model"),
)

_WORD_OF = {word.key: word for word in WORDS}
_PARTS = {key.rpartition(".")[0] for key in _WORD_OF if "." in key}  # sections that are looked into


def missing(name: str) -> Exception:
    """The error for an argument that is not there yet."""
    what, instead = MISSING[name]
    return not_yet(name, what, instead)


def checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, flat, under the table's keys. Raises for a key or a type that is not in the table."""
    return dict(_flat(config, ""))


def without_effect(flat: Mapping[str, Any]) -> list[Word]:
    """The words for the config's keys that have no effect."""
    return [_WORD_OF[key] for key in flat if _WORD_OF[key].standing is Standing.WITHOUT_EFFECT]


def _flat(section: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in section.items():
        key = SYNONYMS.get(f"{prefix}{name}", f"{prefix}{name}")
        if key in _PARTS and value is None:
            continue
        if key in _PARTS:
            found += _flat(_checked_type(key, Kind.SECTION, value), f"{key}.")
            continue
        word = _WORD_OF.get(key)
        if word is None:
            raise _unknown(f"{prefix}{name}")
        if value is not None:
            _checked_type(key, word.kind, value)
        if word.standing is Standing.NOT_YET and word.wanted(value):
            raise not_yet(word.named, word.became, "leave it out, or turn it off")
        found.append((key, value))
    return found


def _unknown(key: str) -> ConfigError:
    near = get_close_matches(key, [*_WORD_OF, *_PARTS, *SYNONYMS], n=1)
    meant = f"did you mean {near[0]}?" if near else "see docs/from_deepspeed.md for those that are"
    return ConfigError(f"{key}: is not a key that is known; {meant}")


def _checked_type(key: str, kind: Kind, value: Any) -> Any:
    match kind:
        case Kind.BOOL:
            fits = isinstance(value, bool)
        case Kind.WHOLE:  # 5e8 in JSON is a float
            fits = _is_number(value) and value >= 0 and int(value) == value
        case Kind.NUMBER:
            fits = _is_number(value) and value >= 0
        case Kind.TEXT:
            fits = isinstance(value, str)
        case Kind.SECTION:
            fits = isinstance(value, Mapping)
        case Kind.ANYTHING:
            fits = True
    if not fits:
        raise wrong(key, value, "has another type", kind.value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def calls_markdown() -> str:
    """The table of calls for docs/from_deepspeed.md."""
    lines = ["| DeepSpeed | the same without its words |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{call.theirs}` | {call.ours} |" for call in CALLS)])


def markdown() -> str:
    """The table of keys for docs/from_deepspeed.md."""
    lines = ["| key | | what became of it |", "|---|---|---|"]
    for word in sorted(WORDS, key=lambda word: list(Standing).index(word.standing)):
        became = word.became
        if word.standing is Standing.NOT_YET:
            became += " are not there yet" if became.endswith("s") else " is not there yet"
        lines.append(f"| `{word.named}` | {word.standing.value} | {became} |")
    return "\n".join(lines)
