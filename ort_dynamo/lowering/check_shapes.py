"""Checks the shapes that a program's own lowering gives."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import ValueInfoProto

__all__ = ["check_shapes"]


def check_shapes(model: ir.Model) -> None:
    """Compare the declared shapes of a model's outputs, which are torch's, with those that ONNX infers.

    Ranks count, and sizes that both know. The operators of a domain without inference give no shape.

    Raises:
        AssertionError: an output has another shape.
    """
    proto = ir.to_proto(model)
    expected = {output.name: _sizes(output) for output in proto.graph.output}
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    for output in inferred.graph.output:
        given, wanted = _sizes(output), expected[output.name]
        if given is not None and wanted is not None and not _may_be_equal(given, wanted):
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
