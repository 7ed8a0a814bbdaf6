"""The state of a whole trainer: its model and optimizer, how far it has come, and its loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ort_dynamo.errors import SeveralProcessesError
from ort_dynamo.training.optim.config import _OptimizerConfig
from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
from ort_dynamo.training.requirements import require
from ort_dynamo.training.train_step_info import TrainStepInfo
from ort_dynamo.training.trainer.running import RunningModel
from ort_dynamo.training.trainer.state_dicts import (
    check_keys,
    extra_section,
    gathered_section,
    load_extra,
    load_gathered,
    load_model,
    load_optimizer,
    model_section,
    optimizer_section,
    own_part,
    partition_section,
    section_of,
    shares_section,
)

__all__ = ["load_trainer_state", "trainer_state"]


def trainer_state(
    running: RunningModel, info: TrainStepInfo, options: ORTTrainerOptions, config: _OptimizerConfig
) -> dict[str, Any]:
    """Give the full state of a run: copies, as arrays and scalars, in ORTTrainer's schema.

    Raises:
        SeveralProcessesError: gradients are being accumulated, and each process has its own sums.
    """
    distributed = options.distributed
    gathers = info.step % running.kind.gathers != 0
    if gathers and running.shares_layers:
        reason = (
            "a state in the midst of an accumulation has sums of parts of layers. Save it after a step that updates"
        )
        raise SeveralProcessesError(reason=reason)
    if gathers and running.keeps_gradients_apart:
        reason = (
            "with allreduce_post_accumulation each process has its own sums of gradients until an update, and a state "
            "cannot have them all. Save it after a step that updates"
        )
        raise SeveralProcessesError(reason=reason)
    stages = distributed.pipeline_parallel.pipeline_parallel_size
    found: dict[str, Any] = {
        "model": model_section(running.state, running.combined.model),
        "optimizer": optimizer_section(running.state),
        "trainer_options": {
            "mixed_precision": options.mixed_precision.enabled,
            "zero_stage": distributed.deepspeed_zero_optimization.stage,
            "world_rank": distributed.world_rank,
            "world_size": distributed.world_size,
            "optimizer_name": config.name,
            "data_parallel_size": distributed.data_parallel_size,
            "horizontal_parallel_size": distributed.horizontal_parallel_size,
            **({"pipeline_parallel_size": stages} if stages > 1 else {}),
        },
        "train_step_info": {"optimization_step": info.optimization_step, "step": info.step},
    }
    if extra := extra_section(running.combined.model):
        found["extra_state"] = extra
    scaler = options.mixed_precision.loss_scaler
    if scaler is not None:
        found["loss_scaler"] = {"loss_scale": scaler.loss_scale}
        if hasattr(scaler, "_stable_steps_count"):
            found["loss_scaler"]["stable_steps"] = scaler._stable_steps_count
    if distributed.deepspeed_zero_optimization.stage:
        found["partition_info"] = partition_section(running.state)
        found["model"] = own_part(found["model"], running.state, is_first=distributed.world_rank == 0)
    elif running.shares_layers:
        found["partition_info"] = shares_section(running.combined.model)
    if (names := running.own_names) is not None:
        full = found["model"]["full_precision"]
        found["model"] = {"full_precision": {name: value for name, value in full.items() if name in names}}
    if gathers:
        found["gathered_gradients"] = gathered_section(running.state)
        found["trainer_options"]["gradient_accumulation_steps"] = running.kind.gathers
    return found


@torch.inference_mode(False)  # later steps write to the tensors that this makes
def load_trainer_state(
    given: Mapping[str, Any],
    running: RunningModel,
    info: TrainStepInfo,
    options: ORTTrainerOptions,
    config: _OptimizerConfig,
    *,
    strict: bool,
) -> None:
    """Load a dictionary of `trainer_state`; a section that is not there leaves the trainer's as it is.

    Raises:
        AssertionError: it is of another optimizer.
        RuntimeError: names are missing or unknown, if strict; or something has another shape or type. Nothing has
            changed then.
    """
    name = section_of(given, "trainer_options").get("optimizer_name", config.name)
    is_same = isinstance(name, str) and name == config.name
    require(is_same, f"Optimizer mismatch: expected {config.name}, got {name!s:.80}")
    state, module = running.state, running.combined.model
    if strict:
        own = {"model": model_section(state, module), "optimizer": optimizer_section(state)}
        mine = own_part(own["model"], state, is_first=False)["full_precision"]
        others = own["model"]["full_precision"].keys() - mine.keys() if running.zero is not None else set()
        if running.own_names is not None:
            others = own["model"]["full_precision"].keys() - running.own_names
        check_keys(own, given, free=others)
    optimization_step = _count(given, "train_step_info", "optimization_step", info.optimization_step)
    step = _count(given, "train_step_info", "step", info.step)
    gathers = options.batch.gradient_accumulation_steps
    if "gathered_gradients" in given:
        gathers = _count(given, "trainer_options", "gradient_accumulation_steps", gathers, least=1)
    scaler = options.mixed_precision.loss_scaler
    scale, stable = (None, 0) if scaler is None else _scale(section_of(given, "loss_scaler"))
    loads = (  # the first runs the program's code, which may raise
        load_extra(module, given, strict=strict),
        load_model(state, module, given, strict=strict),
        load_optimizer(state, given),
        partial(_begin_accumulation, running, gathers, clips=options.utils.grad_norm_clip),
        load_gathered(state, given),
    )
    for load in loads:  # all of them have been looked at
        load()
    running.regrouped()
    info.optimization_step, info.step = optimization_step, step
    if scaler is not None and scale is not None:
        scaler.loss_scale = scale
        if hasattr(scaler, "_stable_steps_count"):
            scaler._stable_steps_count = stable


def _begin_accumulation(running: RunningModel, gathers: int, *, clips: bool) -> None:
    """Forget the accumulation that runs, and gather gradients over a number of steps from now on."""
    running.state.forget_gathered()
    running.change_steps(gathers=gathers, clips=clips)


def _scale(section: Mapping[str, Any]) -> tuple[float | None, int]:
    """Return the loss scale, if there is one, and after how many steps without an overflow."""
    if "loss_scale" not in section:
        return None, 0
    try:
        scale, stable = float(section["loss_scale"]), int(section.get("stable_steps", 0))
    except (TypeError, ValueError, OverflowError) as error:
        raise RuntimeError(f"state_dict[loss_scaler] is {dict(section)!r}, where numbers are expected") from error
    if not 0 < scale < math.inf or stable < 0:
        raise RuntimeError(
            f"state_dict[loss_scaler] is {dict(section)!r}: a scale must be above 0, and a count at least 0"
        )
    return scale, stable


def _count(given: Mapping[str, Any], section: str, name: str, default: int, least: int = 0) -> int:
    value = section_of(given, section).get(name, default)
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RuntimeError(f"state_dict[{section}][{name}] is {value!r}, where a number is expected") from error
    if count < least:
        raise RuntimeError(f"state_dict[{section}][{name}] is {value!r}, where a number >= {least} is expected")
    return count
