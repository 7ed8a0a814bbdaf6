"""Reads an ORTTrainer's options: devices, processes, options of the backend and rules of the update."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from ort_dynamo.embedding import Options, make_options, warn_program
from ort_dynamo.errors import DeviceNotAvailableError, ProcessGroupError, SeveralProcessesError
from ort_dynamo.training.environment import TORCHRUN, local_rank_of_environment, torchrun_says
from ort_dynamo.training.optim.config import AdamConfig, LambConfig, _OptimizerConfig
from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
from ort_dynamo.training.trainer.update_rules import AdamRule, LambRule, Rule, SGDRule

__all__ = [
    "backend_options",
    "check_device",
    "fits_one_session",
    "join_processes",
    "refuse_what_is_not_there",
    "rules_of",
    "training_device",
]

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def training_device(options: ORTTrainerOptions | None) -> torch.device:
    """Return the device to train on: device.id; without any options CUDA where there is it.

    "cuda" is local_rank's device where there are several processes.

    Raises:
        DeviceNotAvailableError: torch knows no device of that name.
    """
    if options is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(options.device.id)
    except RuntimeError as error:
        raise DeviceNotAvailableError(device=options.device.id, version=torch.__version__) from error
    if device.type == "cuda" and device.index is None and options.distributed.world_size > 1:
        return torch.device("cuda", options.distributed.local_rank)
    return device


def check_device(device: torch.device) -> None:
    """Raise DeviceNotAvailableError if it is neither a CPU nor a CUDA device that is here: torch's error varies."""
    is_missing = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    if is_missing or device.type not in _PROVIDERS:
        raise DeviceNotAvailableError(device=str(device), version=torch.__version__)


def backend_options(options: ORTTrainerOptions, device: torch.device) -> Options:
    """Return the options of torch.compile(backend="ort_train") that a trainer's options ask for.

    Raises:
        InvalidOptionError: one of them has a value that the backend cannot take.
    """
    transformer, casts = options.graph_transformer, options.graph_transformer.propagate_cast_ops_config
    given: dict[str, Any] = {
        "attn_dropout_recompute": transformer.attn_dropout_recompute,
        "gelu_recompute": transformer.gelu_recompute,
        "transformer_layer_recompute": transformer.transformer_layer_recompute,
        "number_recompute_layers": transformer.number_recompute_layers,
        "recompute_from_inputs": options.utils.memory_efficient_gradient,
        "propagate_cast_ops_strategy": casts.strategy,
        "propagate_cast_ops_level": casts.level,
        "propagate_cast_ops_allow": tuple(casts.allow),
        "allow_layer_norm_mod_precision": transformer.allow_layer_norm_mod_precision,
        "fuse": options._internal_use.enable_internal_postprocess,
        "contrib_ops": options._internal_use.enable_onnx_contrib_ops,
        "provider_options": _provider_options(options, device),
        "session_options": options.session_options,
    }
    return make_options(given)


_MOST_ELEMENTS = {"AdamOptimizer": 1 << 18, "LambOptimizer": None, "SGDOptimizer": 1 << 23}
"""Optimizer -> the maximum number of trained elements for one session per step on the CPU; None: no limit.

For steps of a few milliseconds, one session took 0.8 to 0.95 of the time of a forward, a backward and torch's update,
with each optimizer: no Python runs in between. With large weights the update is bound by memory. torch's fused AdamW
passes over memory once, ONNX operators fifteen times (one session took 0.95 at 130 thousand elements, 1.07 at 540
thousand, 1.26 at 4 million). SGD is at par (0.98 to 1.02), but one session holds new weights beside the old ones. torch
has no fused LAMB (0.68 to 0.86). Models were small GPTs, interleaved, with one thread and AVX-512;
bench/bench_trainer_step.py measures it.
"""


def fits_one_session(options: ORTTrainerOptions, optimizer: str, elements: int, device: torch.device) -> bool:
    """Decide whether a whole step is compiled as one graph.

    Args:
        options: options that recompute need a separate backward.
        optimizer: the name in its configuration.
        elements: the number of trained elements.
        device: on CUDA, torch's kernels update, since nothing was measured there.
    """
    most = _MOST_ELEMENTS[optimizer]
    return device.type == "cpu" and not _recomputes(options) and (most is None or elements <= most)


def _recomputes(options: ORTTrainerOptions) -> bool:
    """Check whether the backward is to recompute anything, which only a backward of its own does."""
    transformer = options.graph_transformer
    flags = (
        transformer.attn_dropout_recompute,
        transformer.gelu_recompute,
        transformer.transformer_layer_recompute,
        options.utils.memory_efficient_gradient,
    )
    return any(flags)


def _provider_options(options: ORTTrainerOptions, device: torch.device) -> dict[str, str]:
    """Return the provider options of the device's provider, and its memory limit if it has one."""
    given = dict(options._validated_opts["provider_options"])
    found: Mapping[str, Any] = given.get(_PROVIDERS.get(device.type, ""), {})
    limit = {"gpu_mem_limit": options.device.mem_limit} if device.type == "cuda" and options.device.mem_limit else {}
    return {name: str(value) for name, value in {**limit, **found}.items()}


def rules_of(
    config: _OptimizerConfig, names: Sequence[str], known: Collection[str], tied: Mapping[str, str] = {}
) -> dict[str, Rule]:
    """Name of a weight -> how it is updated.

    Args:
        config: the optimizer's.
        names: the weights that are trained.
        known: all that the model has; a group that names another is warned of.
        tied: another name of a weight, such as an ONNX file's -> its name; a group may have either.
    """
    given = {name: group for group in reversed(config.params) for name in group["params"]}
    by_name = {tied.get(name, name): group for name, group in given.items()}
    if unknown := sorted(set(given) - set(known)):
        warn_program(f"The optimizer's groups name parameters that the model does not have: {unknown}")
    return {name: _rule(config, by_name.get(name, config.defaults)) for name in names}


def _rule(config: _OptimizerConfig, values: Mapping[str, Any]) -> Rule:
    if not isinstance(config, (AdamConfig, LambConfig)):
        return SGDRule()
    shared: dict[str, Any] = {
        "max_norm_clip": float(values["max_norm_clip"]),
        "alpha": float(values["alpha"]),
        "beta": float(values["beta"]),
        "lambda_coef": float(values["lambda"]),
        "epsilon": float(values["epsilon"]),
        "do_bias_correction": bool(values["do_bias_correction"]),
    }
    if isinstance(config, LambConfig):
        return LambRule(**shared, ratio_min=float(values["ratio_min"]), ratio_max=float(values["ratio_max"]))
    after = values["weight_decay_mode"] == AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
    return AdamRule(**shared, decay_after=after)


def refuse_what_is_not_there(options: ORTTrainerOptions) -> None:
    """Raise an error for options that are not supported, alone or together; it names the alternative.

    Raises:
        SeveralProcessesError: layers or a pipeline are shared, or a file would contain weights that ZeRO splits.
        ProcessGroupError: Adasum needs a number of processes that is a power of two.
    """
    asked = options.distributed
    stages = asked.pipeline_parallel.pipeline_parallel_size
    if stages > 1:
        _refuse_with_pipeline(options, stages)
    if asked.world_size == 1:
        return
    _refuse_with_horizontal(options)
    if asked.enable_adasum and asked.world_size & (asked.world_size - 1):
        reason = f"enable_adasum pairs processes, so world_size must be a power of two, not {asked.world_size}"
        raise ProcessGroupError(reason=reason)
    if asked.deepspeed_zero_optimization.stage and any(options.debug.graph_save_paths._validated_opts.values()):
        reason = (
            "debug.graph_save_paths asks for the graph of a step, and with deepspeed_zero_optimization.stage 1 no "
            "process has all of the optimizer's state. Save the graphs in one process, or with stage 0"
        )
        raise SeveralProcessesError(reason=reason)


def _refuse_with_pipeline(options: ORTTrainerOptions, stages: int) -> None:
    """Raise SeveralProcessesError for options that do not go with stages of a model."""
    asked = options.distributed
    with_it = {
        "horizontal_parallel_size above 1": asked.horizontal_parallel_size > 1,
        **_of_whole_models(options),
    }
    _refuse_together("pipeline_parallel_size", stages, with_it)
    _refuse_remainder("pipeline_parallel_size", stages, asked.world_size)


def _refuse_with_horizontal(options: ORTTrainerOptions) -> None:
    """Raise SeveralProcessesError for options that do not go with layers that processes share."""
    asked = options.distributed
    size = asked.horizontal_parallel_size
    if size == 1:
        return
    _refuse_remainder("horizontal_parallel_size", size, asked.world_size)
    with_it = {**_of_whole_models(options), "mixed_precision.enabled": False}  # that goes with shared layers
    _refuse_together("horizontal_parallel_size", size, with_it)


def _of_whole_models(options: ORTTrainerOptions) -> dict[str, bool]:
    """List the options that need a model that each process has whole, each with whether it is asked for."""
    asked = options.distributed
    return {
        "deepspeed_zero_optimization.stage 1": bool(asked.deepspeed_zero_optimization.stage),
        "enable_adasum": asked.enable_adasum,
        "mixed_precision.enabled": options.mixed_precision.enabled,
        "debug.graph_save_paths": any(options.debug.graph_save_paths._validated_opts.values()),
        "debug.check_model_export": options.debug.check_model_export,
        "_internal_use.extra_postprocess": bool(options._internal_use.extra_postprocess),
    }


def _refuse_together(name: str, size: int, with_it: Mapping[str, bool]) -> None:
    if found := [other for other, is_there in with_it.items() if is_there]:
        reason = f"{name} {size} and {found[0]} do not go together. Leave one of them out"
        raise SeveralProcessesError(reason=reason)


def _refuse_remainder(name: str, size: int, world: int) -> None:
    if world % size:
        raise ProcessGroupError(reason=f"{name} ({size}) does not divide world_size ({world})")


def join_processes(options: ORTTrainerOptions) -> bool:
    """Join the default process group, where options ask for one; a program that has made it keeps its own.

    Returns:
        Whether there are several processes.

    Raises:
        ProcessGroupError: options and the group, or torchrun's variables, do not say the same; or there is neither.
    """
    asked = options.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        if asked.world_size == 1:
            return False
        _initialise(asked.world_size, asked.world_rank)
    size, rank = distributed.get_world_size(), distributed.get_rank()
    _compare("world_size", asked.world_size, size, "the process group's size")
    _compare("world_rank", asked.world_rank, rank, "this process's rank")
    if size > 1:
        local = local_rank_of_environment(asked.local_rank)
        _compare("local_rank", asked.local_rank, local, "the environment's LOCAL_RANK")
    return size > 1


def _initialise(size: int, rank: int) -> None:
    said = torchrun_says()
    if said is None:
        reason = (
            f"distributed.world_size is {size}, and neither is there a process group, nor are there the variables "
            f"{', '.join(TORCHRUN)} to make one. Start the program by: torchrun --nproc-per-node {size} PROGRAM"
        )
        raise ProcessGroupError(reason=reason)
    # Looked at first: a group of another size would wait for processes that never come.
    _compare("world_size", size, said[1], "the environment's WORLD_SIZE")
    _compare("world_rank", rank, said[0], "the environment's RANK")
    distributed.init_process_group()  # gloo for the CPU's tensors, NCCL for CUDA's


def _compare(name: str, asked: int, found: int, what: str) -> None:
    if asked != found:
        raise ProcessGroupError(reason=f"distributed.{name} is {asked}, but {what} is {found}")
