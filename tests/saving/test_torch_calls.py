"""A call of torch between sessions becomes ONNX nodes, or none if it has no form."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from ort_dynamo.saving.torch_calls import JoinedGraph, spelled

X = np.arange(24, dtype=np.float32).reshape(8, 1, 3)


def called(call: str, *args: Any, shape: list[int] | None = None) -> np.ndarray | None:
    """The result of a call on X, by the nodes that it becomes."""
    joined = JoinedGraph()
    given = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(X.shape))
    joined.graph.inputs.append(given)
    joined.values["x"] = given
    typed = {} if shape is None else {"type": given.type, "shape": ir.Shape(shape)}
    result = spelled(joined, {"call": call, "args": [{"value": "x"}, *args], "value": "y"}, typed)
    if result is None:
        return None
    joined.graph.outputs.append(result)
    (found,) = ReferenceEvaluator(ir.to_proto(ir.Model(joined.graph, ir_version=10))).run(None, {"x": X})
    assert isinstance(found, np.ndarray)
    return found


@pytest.mark.parametrize("axes", [0, 1, -2, [0, 1], [2]])
def test_squeeze_removes_given_dimensions_of_one_alone(axes: Any) -> None:
    overload, dims = ("dim", axes) if isinstance(axes, int) else ("dims", tuple(axes))
    expected = torch.from_numpy(X).squeeze(dims)
    found = called(f"aten.squeeze.{overload}", axes, shape=list(expected.shape))
    assert found is not None
    assert found.shape == tuple(expected.shape)


def test_slices_count_from_either_end() -> None:
    for args, expected in (
        ((0, 2), X[2:]),
        ((0, -3, -1), X[-3:-1]),
        ((2, None, 2), X[:, :, :2]),
        ((0, 1, 8, 3), X[1::3]),
    ):
        found = called("aten.slice.Tensor", *args, shape=list(expected.shape))
        assert found is not None
        np.testing.assert_array_equal(found, expected)


def test_a_view_by_strides_has_no_form() -> None:
    assert called("aten.as_strided.default", [2, 3], [1, 1], 0, shape=[2, 3]) is None
