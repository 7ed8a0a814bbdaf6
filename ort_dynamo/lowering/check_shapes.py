"""Checks the shapes that a program's own lowering gives."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import ValueInfoProto

__all__ = ["check_shapes"]

_LENGTHS = frozenset(
    {
        "AveragePool",
        "Col2Im",
        "Conv",
        "ConvTranspose",
        "DFT",
        "LpPool",
        "MaxPool",
        "MaxUnpool",
        "Range",
        "Resize",
        "STFT",
    }
)
"""Operators that compute lengths of axes: ONNX's inference may round them otherwise than ONNX Runtime does."""


def check_shapes(model: ir.Model) -> None:
    """Compare the declared shapes of a model's outputs, which are torch's, with those that ONNX infers.

    Ranks count, and sizes that both know, unless an operator computes lengths. The operators of a domain without
    inference give no shape.

    Raises:
        AssertionError: an output has another shape.
    """
    proto = ir.to_proto(model)
    expected = {output.name: _sizes(output) for output in proto.graph.output}
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    computes_lengths = any(node.op_type in _LENGTHS for node in proto.graph.node)
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    for output in inferred.graph.output:
        given, wanted = _sizes(output), expected[output.name]
        if given is None or wanted is None or (len(given) == len(wanted) and computes_lengths):
            continue
        if not _may_be_equal(given, wanted):
            raise AssertionError(f"the lowering gives the shape {_spelled(given)}, torch gives {_spelled(wanted)}")


def _sizes(value: ValueInfoProto) -> list[int | str] | None:
    """List the sizes of a value, each as a number, as a symbol, or as "" where it is unknown; None without a rank."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in kind.shape.dim]


def _may_be_equal(given: list[int | str], wanted: list[int | str]) -> bool:
    pairs = zip(given, wanted, strict=False)
    return len(given) == len(wanted) and all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))


def _spelled(sizes: list[int | str]) -> str:
    return f"[{', '.join(str(size) or '?' for size in sizes)}]"
