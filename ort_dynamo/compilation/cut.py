"""torch's partitioner cuts the joint graph into forward and backward, as our passes have tagged it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase

from ort_dynamo.graph.build import PassRecord
from ort_dynamo.graph.marks import RETURNED_STRIDES, RETURNED_VIEWS
from ort_dynamo.lowering.symbols import symbols_of
from ort_dynamo.options.groups import Options
from ort_dynamo.passes.fx.analysis.aliases import returned_views
from ort_dynamo.passes.fx.analysis.eager_strides import returned_strides
from ort_dynamo.passes.fx.analysis.fake_values import separate_memory
from ort_dynamo.passes.fx.analysis.memory import MemoryRecord, freed_by_backward, memory_record
from ort_dynamo.passes.pipelines import (
    backward_passes,
    cut_passes,
    forward_passes,
    fx_passes,
    placement_passes,
    recompute_passes,
    saved_result_passes,
    section_passes,
)
from ort_dynamo.passes.running import run_passes
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.aot import default_partition
from ort_dynamo.torch_internals.process_group import group_store

__all__ = ["Halves", "PartitionRecord", "cut", "mark", "mark_inference", "partition", "run_checked", "tag_recomputed"]

_log = logging.getLogger(__name__)  # TORCH_LOGS=ort_dynamo shows it


@dataclass(frozen=True)
class Halves:
    """The forward and backward graph of a joint graph.

    Attributes:
        forward: the graph that saves tensors for the backward.
        backward: the graph that reads them, and recomputes the tensors that are not saved.
        passes: the passes that ran before, between and after.
    """

    forward: GraphModule
    backward: GraphModule
    passes: tuple[PassRecord, ...]


@dataclass(frozen=True)
class PartitionRecord:
    """The record of partitioning one joint graph.

    Attributes:
        passes: the passes that ran on it and on its forward and backward graph, in order.
        memory: the tensors that are saved for the backward, and the nodes that are recomputed.
    """

    passes: tuple[PassRecord, ...]
    memory: MemoryRecord


def mark(gm: GraphModule, options: Options, target: Target, threads: int) -> tuple[PassRecord, ...]:
    """Run the FX passes on a joint or inference graph, in place, and those that place nodes in torch by choice.

    Args:
        gm: a graph that AOTAutograd has traced.
        options: all options.
        target: the target of its sessions.
        threads: the number of threads for the choice between torch and a session.
    """
    deterministic = options.session.resolved().deterministic
    marked = run_checked(fx_passes(options.passes, deterministic=deterministic), gm, options)
    placing = placement_passes(options.passes, target, threads, deterministic=deterministic)
    return marked + run_checked(placing, gm, options)


def run_checked(passes: Sequence[PassBase], gm: GraphModule, options: Options) -> tuple[PassRecord, ...]:
    """Run FX passes on a graph, checked and written to a folder as the options say."""
    return run_passes(passes, gm, check=options.dump.verify, folder=options.dump.save_onnx)


def tag_recomputed(
    joint: GraphModule, options: Options, target: Target, static: Sequence[int] = ()
) -> tuple[PassRecord, ...]:
    """Tag, in place, the nodes that the backward recomputes.

    Args:
        joint: a marked joint graph.
        options: the options of recomputation, and whether the graph is checked after each pass.
        target: the target of its sessions.
        static: indices of its inputs that are parameters or buffers.
    """
    decide = _sizes_decide(joint, options)
    least, fused = target.facts.repeated_bytes if decide else None, target.fuses_kernels and decide
    passes = recompute_passes(options.recompute, tuple(static), least, fused=fused)
    return run_checked(passes, joint, options)


def _sizes_decide(gm: GraphModule, options: Options) -> bool:
    """Check whether the partitioner may decide by bytes.

    Ranks that compile the same graph need the same islands, although their examples of symbolic sizes differ. So if
    ranks are compared, bytes that depend on these examples decide nothing.
    """
    if not options.segment.compare_ranks or group_store() is None:
        return True
    return not any(symbols_of(node.meta.get("val")).free for node in gm.graph.find_nodes(op="placeholder"))


def cut(joint: GraphModule, inputs: Sequence[torch.Tensor], options: Options, target: Target, **kwargs: Any) -> Halves:
    """Decide which nodes the backward recomputes, and cut a marked joint graph into forward and backward.

    The default partition saves the tensors that the backward reads. The min-cut partition would recompute pointwise
    chains on the premise that a code generator fuses them for free; ONNX Runtime runs each operator as a kernel.

    Args:
        joint: the joint graph; it gets tags.
        inputs: its inputs.
        options: the options of recomputation, and whether the backward is cut into sections.
        target: the target of the sessions.
        kwargs: the keyword arguments that AOTAutograd passes to its partition function.
    """
    static = kwargs.get("static_lifetime_input_indices") or ()
    before = (
        *run_checked(saved_result_passes(kwargs["num_fwd_outputs"]), joint, options),
        *tag_recomputed(joint, options, target, static),
        *run_checked(cut_passes(), joint, options),
    )
    forward, backward = default_partition(joint, inputs, **kwargs)
    for half in (forward, backward):
        separate_memory(half)
    after = (
        *run_checked(forward_passes(), forward, options),
        *run_checked(backward_passes(), backward, options),
        *run_checked(backward_passes(), joint, options),
    )
    sections = _section_passes(forward, backward, options, target, kwargs["num_fwd_outputs"])
    return Halves(forward, backward, (*before, *after, *run_checked(sections, backward, options)))


def _section_passes(
    forward: GraphModule, backward: GraphModule, options: Options, target: Target, outputs: int
) -> tuple[PassBase, ...]:
    """Return the passes that cut a backward into sections."""
    if not _sizes_decide(backward, options):
        return ()
    freed = freed_by_backward(forward, backward, outputs)
    return section_passes(options.passes, target, freed, saved=options.dump.save_onnx is not None)


def partition(
    joint: GraphModule, inputs: Sequence[torch.Tensor], options: Options, target: Target, threads: int, **kwargs: Any
) -> tuple[GraphModule, GraphModule, PartitionRecord]:
    """Mark a joint graph, and cut it into forward and backward.

    Args:
        joint: the joint graph of AOTAutograd.
        inputs: its inputs.
        options: all options.
        target: the target of the sessions.
        threads: the number of threads for the choice between torch and a session.
        kwargs: the keyword arguments that AOTAutograd passes to its partition function.

    Returns:
        The forward graph, the backward graph, and a record of the passes and of the saved tensors.
    """
    views, outputs = returned_views(joint.graph), kwargs["num_fwd_outputs"]
    strides = returned_strides(joint.graph)
    marked = mark(joint, options, target, threads)
    halves = cut(joint, inputs, options, target, **kwargs)
    forward, backward = halves.forward, halves.backward
    forward.meta[RETURNED_VIEWS] = views.intersection(range(outputs))
    forward.meta[RETURNED_STRIDES] = {index: one for index, one in strides.items() if index < outputs}
    backward.meta[RETURNED_STRIDES] = {index - outputs: one for index, one in strides.items() if index >= outputs}
    memory = memory_record(joint, forward, backward, outputs)
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", memory.summary())
    return forward, backward, PartitionRecord(marked + halves.passes, memory)


def mark_inference(gm: GraphModule, options: Options, target: Target, threads: int) -> tuple[PassRecord, ...]:
    """Run the part of `partition` before the cut on a graph without gradients; takes the arguments of `mark`."""
    gm.meta[RETURNED_VIEWS] = returned_views(gm.graph)
    gm.meta[RETURNED_STRIDES] = returned_strides(gm.graph)
    return mark(gm, options, target, threads)
