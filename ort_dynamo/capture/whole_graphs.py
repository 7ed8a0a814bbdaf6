"""Captures a Dynamo graph, or a module that calls it, as one ATen graph: for whole steps and for files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import GraphModule

from ort_dynamo.capture.trace import Compiler, trace, without_gradients
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["capture_gradients", "capture_whole", "trace_whole"]


def trace_whole(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: Compiler,
    around: Callable[[GraphModule], nn.Module],
    more_inputs: Sequence[torch.Tensor],
) -> Callable[..., Any]:
    """Trace a module that calls a Dynamo graph, and have it compiled as one graph without gradients of its own.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, real or fake; one that requires a gradient is taken for a parameter without.
        compile_graph: compiles the graph.
        around: makes the module that is traced in the graph's place. It may compute gradients inside.
        more_inputs: inputs that this has after those of the graph.

    Returns:
        A callable with the signature of the module.
    """
    return trace(
        gm,
        without_gradients(example_inputs),
        forward=_unexpected,
        backward=_unexpected,
        inference=compile_graph,
        partition=_unexpected,
        around=around,
        more_inputs=more_inputs,
    )


def capture_whole(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    around: Callable[[GraphModule], nn.Module] = lambda gm: gm,
    more_inputs: Sequence[torch.Tensor] = (),
) -> GraphModule | None:
    """Trace a Dynamo graph, or a module that calls it, as one functional ATen graph without gradients of its own.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, real or fake; one that requires a gradient is taken for a parameter without.
        around: makes the module that is traced in the graph's place. It may compute gradients inside.
        more_inputs: inputs that this has after those of the graph.

    Returns:
        The graph; None where it computes nothing.
    """
    found: list[GraphModule] = []

    def keep(whole: GraphModule, _: slice) -> Callable[..., Any]:
        found.append(whole)
        return whole.forward

    trace_whole(gm, example_inputs, keep, around, more_inputs)
    return found[-1] if found else None


def capture_gradients(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule | None:
    """Trace a Dynamo graph with the gradients of its one differentiable output, a scalar, as one ATen graph.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, real or fake.

    Returns:
        The joint graph, without inputs for tangents: that of the output is one. None where no input requires a
        gradient.
    """
    found: list[GraphModule] = []

    def keep(joint: GraphModule, *_: Any, **__: Any) -> NoReturn:
        found.append(joint)
        raise _CapturedError

    def nothing(*_: Any) -> NoReturn:
        raise _CapturedError

    with suppress(_CapturedError):
        trace(gm, example_inputs, forward=nothing, backward=nothing, inference=nothing, partition=keep)
    if not found:
        return None
    _take_ones_for_tangents(found[0])
    return found[0]


class _CapturedError(Exception):
    """Nothing is left to trace."""


def _unexpected(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a whole graph has no gradients outside it: an input requires one")


def _take_ones_for_tangents(joint: GraphModule) -> None:
    for node in joint.graph.find_nodes(op="placeholder"):
        if not node.name.startswith("tangents"):
            continue
        if node.users:
            fake = node.meta["val"]
            with joint.graph.inserting_before(next(iter(node.users))):
                ones = joint.graph.call_function(
                    aten.full.default, (list(fake.shape), 1), {"dtype": fake.dtype, "device": fake.device}
                )
            ones.meta["val"] = fake
            node.replace_all_uses_with(ones)
        joint.graph.erase_node(node)
    joint.recompile()
