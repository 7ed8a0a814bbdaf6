"""The long tail: overloads without a lowering of our own go through onnxscript's torch_lib.

torch_lib was written for inference export, so its functions are checked: one traced function with kernels on the
target for every node, and torch's dtypes. A function that was seen to be wrong is listed in WRONG.
"""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir
import torch

from ort_dynamo.errors import UnsupportedNodeError
from ort_dynamo.graph.dtypes import TORCH_TO_ONNX
from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.targets.target import OPSET
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten
from ort_dynamo.torch_internals.pytree import tree_leaves, tree_map
from ort_dynamo.torch_internals.tracing.exporter import ExporterMissingError, find_exporter

__all__ = ["WRONG", "call", "has_function"]

WRONG: dict[Any, str] = {
    aten.celu.default: "it takes an alpha of 0, which torch refuses; any other is decomposed",
    aten.nll_loss_forward.default: "total_weight counts the batch, not the weights",
}
"""Overload -> the error of torch_lib's function."""


def call(ctx: LoweringContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lower `ctx.node` by torch_lib's function for its overload.

    Args:
        args, kwargs: the node's own, tensors as ir.Value.

    Returns:
        The results of a lowering.

    Raises:
        UnsupportedNodeError: torch_lib has no function, or one this target cannot run.
    """
    target = ctx.node.target
    assert isinstance(target, OpOverload)
    if target in WRONG:
        raise UnsupportedNodeError(f"no lowering for {target}; torch_lib's is wrong: {WRONG[target]}")
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise UnsupportedNodeError("a random operator that depends on tensor values")
    try:
        exporter = find_exporter(OPSET)
    except ExporterMissingError as error:
        raise UnsupportedNodeError(
            f"no lowering for {target}, and onnxscript's torch_lib cannot be loaded: {error}"
        ) from error
    function = _find_function(target)
    if function is None:
        custom = "" if target.namespace in ("aten", "prims") else ", a custom operator (register_lowering adds one)"
        raise UnsupportedNodeError(f"no lowering for {target}{custom}")
    if any(isinstance(a, (torch.SymInt, torch.SymFloat)) for a in tree_leaves((args, kwargs))):
        raise UnsupportedNodeError(f"no lowering for {target} in ort_dynamo, and torch_lib's would fix a symbolic size")
    if isinstance(ctx.out, torch.Tensor):
        for number in (a for a in tree_leaves((args, kwargs)) if isinstance(a, float)):
            ctx.check_range(number)  # torch_lib would round it to infinity

    ctx.builder.origin += " (torch_lib)"
    opset = exporter.opset(OPSET)
    aliases: dict[ir.Value, ir.Value] = {}

    def alias(value: Any) -> Any:
        if not isinstance(value, ir.Value):
            return value
        if value not in aliases:
            aliases[value] = exporter.stand_in(opset, value)
        return aliases[value]

    kwargs = {k: v for k, v in kwargs.items() if k not in ("layout", "device", "pin_memory", "memory_format")}
    kwargs = {k: _dtype_code(v) for k, v in kwargs.items()}
    tracer = exporter.recorder(opset)
    try:
        with exporter.recording(tracer):
            outputs = function(*tree_map(alias, args), **tree_map(alias, kwargs))
    except exporter.errors as error:
        # torch_lib has many errors for "not supported"; each makes this one node a fallback.
        raise UnsupportedNodeError(f"torch_lib cannot lower {target}: {error.__cause__ or error}") from error
    if tracer.functions:
        raise UnsupportedNodeError(f"torch_lib lowers {target} to a function call, not to operators")
    for value, stand_in in aliases.items():
        ir.convenience.replace_all_uses_with(stand_in, value)
    _adopt(ctx, tracer.nodes)
    return _typed(ctx, outputs, {stand_in: value for value, stand_in in aliases.items()})


def has_function(overload: OpOverload) -> bool:
    """Check whether torch_lib has a function for `overload`; False without the exporter that traces it."""
    try:
        return _find_function(overload) is not None
    except ExporterMissingError:
        return False


@functools.cache
def _find_function(overload: OpOverload) -> Any:
    # "aten::relu" for the default overload, which is how torch_lib spells it.
    found = find_exporter(OPSET).functions(overload.name())  # type: ignore[no-untyped-call]
    return found[0] if found else None


def _adopt(ctx: LoweringContext, nodes: list[ir.Node]) -> None:
    """Move the traced nodes into the graph, types inferred, each with a kernel on the target."""
    for node in nodes:
        node.version = OPSET if not node.domain else node.version
        ctx.builder.check_kernel(node)
        ctx.builder.append(node)


def _typed(ctx: LoweringContext, outputs: Any, real: dict[ir.Value, ir.Value]) -> Any:
    single = isinstance(ctx.out, torch.Tensor)
    values = [outputs] if isinstance(outputs, ir.Value) else list(outputs)
    fakes = [ctx.out] if single else list(ctx.out)
    if len(values) != len(fakes):
        raise UnsupportedNodeError(f"torch_lib gives {len(values)} outputs for {ctx.node.target}, not {len(fakes)}")
    # Types are only wrong by a cast: torch_lib relies on a promotion pass of the exporter that does not run here.
    cast = [ctx.cast(real.get(v, v), f.dtype) for v, f in zip(values, fakes, strict=True)]
    return cast[0] if single else tuple(cast)


def _dtype_code(value: Any) -> Any:
    return TORCH_TO_ONNX[value].value if isinstance(value, torch.dtype) and value in TORCH_TO_ONNX else value
