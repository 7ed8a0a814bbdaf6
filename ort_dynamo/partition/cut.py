"""The cut of the joint graph into forward and backward: our passes mark it, torch's partitioner cuts it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._functorch.partitioners import default_partition
from torch._ops import OpOverload
from torch.fx import GraphModule

from ort_dynamo.batch_statistics import merge_statistics, split_statistics
from ort_dynamo.options import Options, PassOptions, RecomputeOptions
from ort_dynamo.passes.analysis.memory import memory_record, peaks
from ort_dynamo.passes.analysis.stash import draws
from ort_dynamo.passes.pipelines import fx_passes, recompute_passes
from ort_dynamo.runtime.arena import ARENA
from ort_dynamo.segment.segment import session_device

__all__ = ["cut", "mark", "partitioner", "tag_recomputed"]

_log = logging.getLogger(__name__)  # TORCH_LOGS=ort_dynamo shows it


def mark(gm: GraphModule, options: PassOptions) -> None:
    """Run the FX passes on a joint or inference graph, in place."""
    for pass_ in fx_passes(options):
        pass_(gm)


def tag_recomputed(joint: GraphModule, options: RecomputeOptions, **kwargs: Any) -> None:
    """Tag what the backward computes again; the arguments are those of `cut`."""
    static = tuple(kwargs.get("static_lifetime_input_indices") or ())
    for pass_ in recompute_passes(options, static):
        pass_(joint)


def cut(
    joint: GraphModule, inputs: Sequence[torch.Tensor], options: RecomputeOptions, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """Decide what the backward computes again, and cut a marked joint graph into forward and backward.

    The default partition saves what the backward reads. The min-cut partition would recompute pointwise chains on
    the premise that a code generator fuses them for free; ONNX Runtime runs each of them as a kernel.

    Args:
        joint: the joint graph; it gets tags.
        inputs: its inputs.
        options: what to compute again.
        kwargs: what AOTAutograd hands to its partition function.
    """
    tag_recomputed(joint, options, **kwargs)
    split_statistics(joint)
    with _seedless(joint) as restore:
        forward, backward = default_partition(joint, inputs, **kwargs)
        restore(forward)
        restore(backward)
    merge_statistics(forward)
    return forward, backward


@contextmanager
def _seedless(joint: GraphModule) -> Iterator[Callable[[GraphModule], None]]:
    """Stand-ins, without ATen's tag for random operators, for attention without dropout.

    Around each operator with the tag that is computed again, torch would save and load the generator's state, and call
    it through a higher-order operator, which no session can take.

    Yields:
        A function that puts the operators back into a graph made of `joint`.
    """

    def restore(gm: GraphModule) -> None:
        for node in gm.graph.nodes:
            node.target = getattr(node.target, "stands_for", node.target)
        gm.recompile()

    for node in joint.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not draws(node):
            node.target = _stand_in(node.target)
    try:
        yield restore
    finally:
        restore(joint)


@cache
def _stand_in(overload: OpOverload) -> Callable[..., Any]:
    def attention_without_dropout(*args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs)

    attention_without_dropout.stands_for = overload  # type: ignore[attr-defined]
    return attention_without_dropout


def partitioner(options: Options) -> Callable[..., tuple[GraphModule, GraphModule]]:
    """The partition function for AOTAutograd."""

    def partition(joint: GraphModule, inputs: Sequence[torch.Tensor], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        mark(joint, options.passes)
        halves = cut(joint, inputs, options.recompute, **kwargs)
        if not ARENA.registered and session_device(joint).type == "cpu":
            ARENA.expect(max(peaks(*halves)))
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", memory_record(joint, *halves, kwargs["num_fwd_outputs"]).summary())
        return halves

    return partition
