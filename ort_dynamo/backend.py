"""What torch.compile(backend="ort_train") calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._guards import TracingContext
from torch.fx import GraphModule

from ort_dynamo.compiler import CACHE, compile_graph
from ort_dynamo.input_writes import keeps_input_writes
from ort_dynamo.lowering.decompositions import decompositions
from ort_dynamo.capture.whole_resizes import whole_resizes
from ort_dynamo.options import Options, parse_options
from ort_dynamo.partition.cut import mark, partitioner
from ort_dynamo.capture.random_numbers import in_full_precision
from ort_dynamo.runtime.capabilities import installed_runtime
from ort_dynamo.runtime.importing import restore_torch

__all__ = ["ort_train"]

restore_torch()  # before Dynamo traces the first model: the program may have imported onnxruntime itself


def ort_train(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: forward and backward run in ONNX Runtime sessions.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, real or fake.
        mode: "default" or "debug" (ort_dynamo.options.MODES).
        options: option name -> value (docs/options.md).

    Returns:
        A callable with the graph's own signature.

    Raises:
        UnknownModeError, UnknownOptionError, InvalidOptionError: bad arguments.
        RuntimeNotInstalledError, SeveralRuntimesError, ProviderNotAvailableError: no usable ONNX Runtime.
        FallbackRefusedError: fallback="error" and a node that ONNX Runtime cannot take.
    """
    parsed = parse_options(mode, options)
    installed_runtime()
    # The backward is compiled together with the forward, so nothing can fail first at .backward().
    with functorch_config.patch(force_non_lazy_backward_lowering=True), whole_resizes():
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=partial(_compile_forward, options=parsed),
            bw_compiler=partial(_compile_backward, options=parsed),
            inference_compiler=partial(_compile_inference, options=parsed),
            partition_fn=partitioner(parsed),
            decompositions=decompositions(),
            keep_inference_input_mutations=keeps_input_writes(gm),
        )(gm, in_full_precision(gm, example_inputs))
    return compiled


ort_train.reset = CACHE.clear  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


_Compiled = Callable[[list[Any]], Any]

# The graphs' own fake values say more than the example inputs, which are unused below.


def _compile_forward(gm: GraphModule, _: Sequence[Any], options: Options) -> _Compiled:
    _hide_mutations()
    return compile_graph(gm, "forward", options, _seen())


def _compile_backward(gm: GraphModule, _: Sequence[Any], options: Options) -> _Compiled:
    metadata = _metadata()
    if metadata is not None:
        # We never write to saved tensors, so none is donated, and retain_graph=True works. (The config
        # donated_buffer=False would leave None here, which torch 2.13 takes for "some".)
        metadata.bw_donated_idxs = []
    return compile_graph(gm, "backward", options, slice(0))


def _compile_inference(gm: GraphModule, _: Sequence[Any], options: Options) -> _Compiled:
    _hide_mutations()
    mark(gm, options.passes)
    return compile_graph(gm, "inference", options, _seen())


def _metadata() -> ViewAndMutationMeta | None:
    """What AOTAutograd knows of the graph that is being compiled; None where it is not at work."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def _seen() -> slice:
    """Which outputs of a forward the program sees: not those written back to inputs, nor those for the backward."""
    metadata = _metadata()
    if metadata is None:
        return slice(None)
    return slice(metadata.num_mutated_inp_runtime_indices, metadata.num_forward_returns)


def _hide_mutations() -> None:
    """Have AOTAutograd hide from autograd what the program hides: writing to an input under no_grad, or detached.

    It writes inputs back where the graph ends, and does so by `detach().copy_()` only for leaves. By `copy_()`, the
    input's gradient would be lost.
    """
    metadata = _metadata()
    inputs = metadata.input_info if metadata is not None else []
    for index, info in enumerate(inputs):
        if info.mutations_hidden_from_autograd or info.mutations_under_no_grad_or_inference_mode:
            inputs[index] = dataclasses.replace(info, is_leaf=True)
