"""Run a session beside the same model on the CPU without ONNX Runtime's optimizers, and compare their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch

from ort_dynamo.errors import SessionsDifferError
from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.graph.marks import FX_NODE
from ort_dynamo.targets.target import Target

__all__ = ["compared"]

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""dtype -> the tolerance of two results, in units of the larger one's largest finite element."""

_OTHERS = 0.01
"""The part of integers and truth values that may differ, as where rounding decides a comparison."""

_NODES = 8
"""Number of nodes that a message names."""


def compared(
    run: Callable[..., Any], built: BuiltGraph, target: Target, reference: Callable[..., Any]
) -> Callable[..., Any]:
    """Compare each run of a session.

    Args:
        run: runs the session on one value per input.
        built: its graph, with the model before optimizers.
        target: the target that the graph was lowered for.
        reference: runs that model on values on the CPU.

    Returns:
        A function like `run`, which raises SessionsDifferError at the first result that differs.
    """

    def both(*values: Any) -> Any:
        copies = [value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value for value in values]
        results = run(*values)
        for index, (ours, other) in enumerate(zip(results, reference(*copies), strict=True)):
            if difference := _difference(ours.detach().cpu(), other):
                raise SessionsDifferError(
                    index=index,
                    graph=built.name,
                    provider=target.provider,
                    difference=difference,
                    nodes=_makers(built.reference, index),
                )
        return results

    return both


def _difference(ours: torch.Tensor, other: torch.Tensor) -> str:
    """Describe how two results differ; empty if they agree."""
    if ours.shape != other.shape:
        return f"shapes {tuple(ours.shape)} and {tuple(other.shape)}"
    if not ours.numel():
        return ""
    if not ours.is_floating_point():
        part = (ours != other).double().mean().item()
        return f"{part:.1%} of its numbers" if part > _OTHERS else ""
    one, two = ours.double(), other.double()
    nans = one.isnan() != two.isnan()
    if nans.any():
        return f"NaN in {int(one.isnan().sum())} and {int(two.isnan().sum())} of {one.numel()} places"
    is_finite = one.isfinite() & two.isfinite()
    if not torch.equal(one[~is_finite].nan_to_num(nan=0.0), two[~is_finite].nan_to_num(nan=0.0)):
        return "infinities in other places"
    one, two = one[is_finite], two[is_finite]
    if not one.numel():
        return ""
    apart, largest = (one - two).abs().max().item(), max(one.abs().max().item(), two.abs().max().item())
    return f"{apart:.2g} apart, largest {largest:.2g}" if apart > _TOLERANCES[ours.dtype] * largest + 1e-30 else ""


def _makers(model: bytes, index: int) -> str:
    """List the last nodes that a result comes from, each with the FX node it was lowered from."""
    graph = onnx.ModelProto.FromString(model).graph
    makers = {name: node for node in graph.node for name in node.output}
    names, listed = [graph.output[index].name], dict[str, str]()
    for name in names:
        node = makers.get(name)
        if node is None or name in listed:
            continue
        origin = next((one.value for one in node.metadata_props if one.key == FX_NODE), "")
        listed[name] = f"  {name} = {node.op_type}({', '.join(node.input)})  # {origin}"
        names += node.input
        if len(listed) == _NODES:
            break
    return "\n".join(listed.values())
