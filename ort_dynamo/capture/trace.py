"""AOTAutograd traces a Dynamo graph: the one capture, for the backend, for memory plans and for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ort_dynamo.capture.decompositions.table import decompositions
from ort_dynamo.capture.image_gradients import allow_symbolic_sizes
from ort_dynamo.capture.input_writes import keeps_input_writes
from ort_dynamo.capture.margin_losses import margin_losses
from ort_dynamo.capture.random_numbers import in_full_precision
from ort_dynamo.capture.recurrent_layers import recurrent_layers
from ort_dynamo.capture.whole_resizes import whole_resizes
from ort_dynamo.graph.marks import RETURNED_VIEWS, WRITTEN_BACK
from ort_dynamo.program.progress import stage
from ort_dynamo.torch_internals.aot import backward_at_once, metadata
from ort_dynamo.torch_internals.aot_cache import serializable, tagged
from ort_dynamo.torch_internals.fakes import of_fixed_sizes
from ort_dynamo.torch_internals.tracing.dynamo import aot_autograd, unboxed
from ort_dynamo.torch_internals.tracing.lazy_code import lazily

__all__ = ["Compiler", "Partition", "trace", "without_gradients"]

Compiler = Callable[[GraphModule, slice], Callable[..., Any]]
"""(a functional ATen graph, which of its outputs the program sees) -> a callable that runs it."""

Partition = Callable[..., tuple[GraphModule, GraphModule]]
"""(joint graph, its inputs, AOTAutograd's keyword arguments) -> (forward, backward)."""


def trace(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Compiler,
    backward: Compiler,
    inference: Compiler,
    partition: Partition,
    around: Callable[[GraphModule], nn.Module] = lambda gm: gm,
    more_inputs: Sequence[torch.Tensor] = (),
    stored_as: str | None = None,
) -> Callable[..., Any]:
    """Trace a Dynamo graph with its gradient, partition it, and compile each graph, the backward right away.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, real or fake.
        forward: compiles the forward graph of a graph with gradients.
        backward: compiles the backward graph; the program sees none of its outputs.
        inference: compiles the single graph if there are no gradients.
        partition: cuts the joint graph into forward and backward.
        around: wraps the graph into the module that is traced; it calls the graph.
        more_inputs: inputs of this module after those of the graph.
        stored_as: let AOTAutograd store the result and look it up; this text is part of the key. All compilers return
            OutputCode then. None stores nothing.

    Returns:
        A callable with the signature of `gm`, or of the module around it.
    """

    def compile_forward(half: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        _hide_mutations()
        half.meta[WRITTEN_BACK] = _written_back(half)
        # autograd refuses writes to a view that a function with a gradient makes. AOTAutograd makes eager's outside.
        half.meta[RETURNED_VIEWS] = half.meta.get(RETURNED_VIEWS, frozenset()) - _with_gradient()
        return forward(half, _seen())

    def compile_backward(half: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        _donate_nothing()
        return backward(half, slice(0))

    def compile_inference(whole: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        _hide_mutations()
        return inference(whole, _seen())

    stage("tracing the model")
    allow_symbolic_sizes()
    traced: Any = around(gm)  # AOTAutograd only calls it
    # The backward is compiled together with the forward, so nothing can fail first at .backward().
    keep = serializable if stored_as is not None else _as_it_is
    tag = nullcontext() if stored_as is None else tagged(stored_as)
    with backward_at_once(), whole_resizes(), recurrent_layers(), margin_losses(), lazily(), tag:
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=keep(compile_forward),
            bw_compiler=keep(compile_backward),
            inference_compiler=keep(compile_inference),
            partition_fn=partition,
            decompositions=decompositions(),
            keep_inference_input_mutations=keeps_input_writes(gm),
        )(traced, [*in_full_precision(gm, example_inputs), *map(of_fixed_sizes, more_inputs)])
    return unboxed(compiled)


def _as_it_is(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    return compile_graph


def without_gradients(example_inputs: Sequence[Any]) -> list[Any]:
    """Give the inputs of a Dynamo graph with those that require a gradient, which are parameters, as constants."""
    return [
        of_fixed_sizes(one.detach()) if isinstance(one, torch.Tensor) and one.requires_grad else one
        for one in example_inputs
    ]


def _seen() -> slice:
    """Find which outputs of a forward the program sees: not tokens or those written back, nor saved tensors.

    Each kind of effect has a token, which orders its operators: the first inputs and outputs.
    """
    known = metadata()
    if known is None:
        return slice(None)
    tokens = len(known.tokens)
    return slice(tokens + known.num_mutated_inp_runtime_indices, tokens + known.num_forward_returns)


def _with_gradient() -> frozenset[int]:
    """Find the outputs of a forward that the program sees with a gradient."""
    known = metadata()
    if known is None:
        return frozenset()
    return frozenset(_seen().start + index for index, one in enumerate(known.output_info) if one.requires_grad)


def _written_back(forward: GraphModule) -> dict[int, int]:
    """Find the outputs that AOTAutograd writes to inputs without gradient: index of the output -> that of the input."""
    known, inputs = metadata(), forward.graph.find_nodes(op="placeholder")
    if known is None or len(inputs) != len(known.tokens) + len(known.input_info):  # parts of tensor subclasses
        return {}
    tokens, pairs = len(known.tokens), enumerate(known.mutated_inp_runtime_indices)
    return {tokens + index: tokens + place for index, place in pairs if _is_plain_write(known.input_info[place])}


def _is_plain_write(info: Any) -> bool:
    return bool(info.mutates_data and not info.mutates_metadata and not info.requires_grad)


def _hide_mutations() -> None:
    """Make AOTAutograd hide writes from autograd that the program hides: to an input under no_grad, or detached.

    It writes inputs back where the graph ends, and does so by `detach().copy_()` only for leaves. By `copy_()`, the
    input's gradient would be lost.
    """
    known = metadata()
    inputs = known.input_info if known is not None else []
    for index, info in enumerate(inputs):
        if info.mutations_hidden_from_autograd or info.mutations_under_no_grad_or_inference_mode:
            inputs[index] = dataclasses.replace(info, is_leaf=True)


def _donate_nothing() -> None:
    """Donate no saved tensor to the backward: we never write to one, so retain_graph=True works.

    The config donated_buffer=False would leave None in the metadata, which torch 2.13 takes for "some".
    """
    known = metadata()
    if known is not None:
        known.bw_donated_idxs = []
