"""The processes that train together: who they are, and whether an ORTTrainer's options say the same."""

from __future__ import annotations

from collections.abc import Mapping

from torch import distributed

from ort_dynamo.errors import ProcessGroupError, SeveralProcessesError
from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
from ort_dynamo.training.trainer.environment import TORCHRUN, local_rank_of_environment, torchrun_says

__all__ = ["join_processes", "refuse_what_is_not_there"]


def refuse_what_is_not_there(options: ORTTrainerOptions) -> None:
    """Raise what says which options cannot be had, or not together, and what to do instead.

    Raises:
        SeveralProcessesError: layers or a pipeline are to be shared, or a file is to have what ZeRO splits.
        ProcessGroupError: Adasum has to pair processes whose number is no power of two.
    """
    asked = options.distributed
    stages = asked.pipeline_parallel.pipeline_parallel_size
    if stages > 1:
        _refuse_with_pipeline(options, stages)
    if asked.world_size == 1:
        return
    _refuse_with_horizontal(options)
    if asked.enable_adasum and asked.world_size & (asked.world_size - 1):
        reason = f"enable_adasum pairs processes, and world_size, {asked.world_size}, is no power of two"
        raise ProcessGroupError(reason=reason)
    if asked.deepspeed_zero_optimization.stage and any(options.debug.graph_save_paths._validated_opts.values()):
        reason = (
            "debug.graph_save_paths asks for the graph of a step, and with deepspeed_zero_optimization.stage 1 no "
            "process has all of the optimizer's state. Save the graphs in one process, or with stage 0"
        )
        raise SeveralProcessesError(reason=reason)


def _refuse_with_pipeline(options: ORTTrainerOptions, stages: int) -> None:
    """Raise SeveralProcessesError for what does not go with stages of a model."""
    asked = options.distributed
    with_it = {
        "horizontal_parallel_size above 1": asked.horizontal_parallel_size > 1,
        **_of_whole_models(options),
    }
    _refuse_together("pipeline_parallel_size", stages, with_it)
    _refuse_remainder("pipeline_parallel_size", stages, asked.world_size)


def _refuse_with_horizontal(options: ORTTrainerOptions) -> None:
    """Raise SeveralProcessesError for what does not go with layers that processes share."""
    asked = options.distributed
    size = asked.horizontal_parallel_size
    if size == 1:
        return
    _refuse_remainder("horizontal_parallel_size", size, asked.world_size)
    with_it = {**_of_whole_models(options), "mixed_precision.enabled": False}  # that goes with shared layers
    _refuse_together("horizontal_parallel_size", size, with_it)


def _of_whole_models(options: ORTTrainerOptions) -> dict[str, bool]:
    """What goes with a model that each process has whole, and whether it is asked for."""
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
        raise ProcessGroupError(reason=f"{name}, {size}, does not divide world_size, {world}")


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
        raise ProcessGroupError(reason=f"distributed.{name} is {asked}, and {what} is {found}")
