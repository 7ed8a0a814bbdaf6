"""Tests of the op builder's nodes, without a table of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from forked import run_program

from ort_dynamo.lowering.builder import LoweringBuilder
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.targets.target import OPSET


@pytest.fixture
def builder() -> LoweringBuilder:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "com.microsoft": 1}, name="graph")
    return LoweringBuilder(graph, find_target("cpu"))


def test_a_node_is_named_by_its_operator_and_its_place(builder: LoweringBuilder) -> None:
    x = builder.input("x", ir.DataType.FLOAT, [2, "n"])
    first = builder.op.Neg(x)
    second = builder.op.Abs(first, _name="mine")
    assert [node.name for node in builder.graph] == ["Neg_node_0", "mine"]
    assert (first.name, second.name) == ("v_Neg_0", "v_Abs_1")
    assert first.dtype == ir.DataType.FLOAT


def test_names_begin_with_the_modules(builder: LoweringBuilder) -> None:
    x = builder.input("x", ir.DataType.FLOAT, [2])
    builder.push_module("outer")
    builder.push_module("inner")
    y = builder.op.Add(x, 1)
    node = y.producer()
    assert node is not None
    assert (node.name, y.name, node.inputs[1].name) == ("outer/inner/Add_node_0", "v_outer.inner.Add_0", _CONSTANT)


_CONSTANT = "outer.inner.const_0"


def test_several_outputs_come_as_a_sequence(builder: LoweringBuilder) -> None:
    x = builder.input("x", ir.DataType.FLOAT, [4])
    parts: Sequence[ir.Value] = builder.op.Split(x, num_outputs=2, _outputs=2)
    named: ir.Value = builder.op.Neg(x, _outputs=["result"])
    assert [part.name for part in parts] == ["v_Split_0_0", "v_Split_0_1"]
    assert named.name == "v_result"


@pytest.mark.parametrize(
    ("dtype", "number", "expected"),
    [
        (ir.DataType.DOUBLE, 1, ir.DataType.DOUBLE),
        (ir.DataType.INT64, 2, ir.DataType.INT64),
        (ir.DataType.FLOAT, 0.5, ir.DataType.FLOAT),
    ],
)
def test_a_number_takes_the_dtype_of_the_tensor_beside_it(
    builder: LoweringBuilder, dtype: ir.DataType, number: float, expected: ir.DataType
) -> None:
    x = builder.input("x", dtype, [2])
    for node in (builder.op.Add(x, number).producer(), builder.op.Add(number, x).producer()):
        assert [value.dtype for value in node.inputs] == [expected, expected]


def test_a_number_without_a_tensor_of_its_type_has_a_dtype_of_its_own(builder: LoweringBuilder) -> None:
    x = builder.input("x", ir.DataType.FLOAT, [2])
    node = builder.op.Reshape(x, [1, 2]).producer()
    assert node.inputs[1].dtype == ir.DataType.INT64


def test_a_number_beside_a_value_without_a_type_is_cast_when_it_runs(builder: LoweringBuilder) -> None:
    unknown = ir.Value(name="unknown")
    node = builder.op.Add(unknown, 1).producer()
    assert node.inputs[1].producer().op_type == "CastLike"


def test_variadic_inputs_share_a_type(builder: LoweringBuilder) -> None:
    x = builder.input("x", ir.DataType.DOUBLE, [1])
    node = builder.op.Concat([1.0], x, [2.0], axis=0).producer()
    assert [value.dtype for value in node.inputs] == [ir.DataType.DOUBLE] * 3


def test_one_input_too_many_is_an_error(builder: LoweringBuilder) -> None:
    x = builder.input("x", ir.DataType.FLOAT, [1])
    with pytest.raises(ValueError, match="Neg has 1 inputs, not 2"):
        builder.op.Neg(x, 1)


def test_an_operator_that_onnx_lacks_is_an_error(builder: LoweringBuilder) -> None:
    x = builder.input("x", ir.DataType.FLOAT, [1])
    with pytest.raises(AttributeError, match="ONNX has no operator Negg"):
        builder.op.Negg(x)


def test_a_domain_of_one_call_is_that_of_its_builder(builder: LoweringBuilder) -> None:
    x = builder.input("x", ir.DataType.FLOAT, [2])
    found = builder.opset("com.microsoft", 1).Gelu(x), builder.op.Gelu(x, _domain="com.microsoft")
    assert [value.producer().domain for value in found] == ["com.microsoft"] * 2


def test_an_output_without_a_name_is_left_out(builder: LoweringBuilder) -> None:
    x = builder.input("x", ir.DataType.FLOAT, [2])
    outputs = [ir.Value(name=""), ir.Value(name="places")]
    found = builder.op.TopK(x, builder.input("k", ir.DataType.INT64, [1]), _outputs=outputs)
    assert [value.name for value in found] == ["", "places"]
    assert found[1] is outputs[1]


@pytest.mark.parametrize("given", ["text", np.arange(3.0), torch.arange(3)], ids=["text", "numpy", "torch"])
def test_a_tensor_and_a_text_become_constants(builder: LoweringBuilder, given: Any) -> None:
    node = builder.op.Identity(given).producer()
    tensor = node.inputs[0].const_value
    assert tensor is not None
    assert node.inputs[0].name in builder.graph.initializers
    assert np.array_equal(tensor.numpy().tolist(), given.encode() if isinstance(given, str) else given.tolist())


def test_a_constant_is_made_of_a_tensor_by_its_name(builder: LoweringBuilder) -> None:
    value = builder.op.initializer(ir.tensor([1.0], name="one"))
    assert builder.graph.initializers["one"] is value
    with pytest.raises(ValueError, match="needs a name"):
        builder.op.initializer(ir.tensor([1.0]))


_STEP = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
torch.compile(model, backend="ort_train", options={"fallback": "error"})(torch.ones(2, 4)).sum().backward()
print([name for name in sys.modules if name.split(".")[0] == "onnxscript" or name.startswith("onnx.reference")])
"""


def test_a_step_imports_neither_onnxscript_nor_the_reference_evaluator() -> None:
    done = run_program(_STEP)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
