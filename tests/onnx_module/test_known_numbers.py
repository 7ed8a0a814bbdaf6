"""Tests of numbers that are computed where a module is made or traced: as ONNX Runtime computes their dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from exported_models import run_onnxruntime
from onnx import TensorProto, helper
from small_graphs import FLOAT, graph_of, model_of, value

from ort_dynamo.onnx_module import OnnxModule
from ort_dynamo.testing import assert_close

Step = tuple[str, list[str], dict[str, Any]]


def model(steps: list[Step], data: dict[str, Any]) -> onnx.ModelProto:
    """A model that adds the result of some steps to x; each step's result is named by its number."""
    nodes = [helper.make_node(name, inputs, [str(at)], **rest) for at, (name, inputs, rest) in enumerate(steps)]
    last = str(len(steps) - 1)
    nodes += [helper.make_node("Cast", [last], ["float"], to=FLOAT), helper.make_node("Add", ["x", "float"], ["y"])]
    return model_of(graph_of(nodes, [value("x", ("n",))], [value("y", None)], data))


def narrow(name: str) -> Step:
    return ("Cast", [name], {"to": TensorProto.INT32})


CASES: list[tuple[list[Step], dict[str, Any]]] = [
    (
        [("Add", ["a", "b"], {}), ("Div", ["0", "c"], {})],
        {"a": np.int32(2**31 - 1), "b": np.int32(10), "c": np.int32(3)},
    ),
    ([("Cast", ["a"], {"to": TensorProto.UINT8}), ("Cast", ["0"], {"to": TensorProto.INT64})], {"a": np.int64(70000)}),
    ([("Cast", ["a"], {"to": TensorProto.INT8}), ("Neg", ["0"], {})], {"a": np.int64(200)}),
    ([("Cast", ["a"], {"to": TensorProto.UINT8}), ("Mod", ["0", "b"], {})], {"a": np.int64(-2), "b": np.uint8(3)}),
    ([("Mod", ["a", "b"], {"fmod": 1})], {"a": np.int32(-7), "b": np.int32(3)}),
    ([("Mod", ["a", "b"], {"fmod": 1})], {"a": np.float32(-7.5), "b": np.float32(0)}),
    ([("Max", ["a", "b"], {})], {"a": np.float32(1), "b": np.float32(np.nan)}),
    ([("Min", ["a", "b"], {})], {"a": np.float32(1), "b": np.float32(np.nan)}),
    ([("Div", ["a", "b"], {})], {"a": np.float32(-1), "b": np.float32(0)}),
    ([("Div", ["a", "b"], {})], {"a": np.float32(0), "b": np.float32(0)}),
    ([("Div", ["a", "b"], {}), ("Floor", ["0"], {})], {"a": np.float32(1), "b": np.float32(-0.0)}),
    ([("Pow", ["a", "b"], {})], {"a": np.float32(-8), "b": np.float32(1 / 3)}),
    ([("Pow", ["a", "b"], {})], {"a": np.float32(0), "b": np.float32(-1)}),
    ([("Mul", ["a", "a"], {})], {"a": np.float32(1e30)}),
    ([("Cast", ["a"], {"to": TensorProto.FLOAT16}), ("Cast", ["0"], {"to": FLOAT})], {"a": np.float32(1.4)}),
    ([("Cast", ["a"], {"to": FLOAT}), ("Cast", ["0"], {"to": TensorProto.INT64})], {"a": np.int64(2**24 + 1)}),
    ([("Shape", ["x"], {}), narrow("0"), ("Mul", ["1", "k"], {}), ("Mul", ["2", "k"], {})], {"k": np.int32(2**30)}),
    (
        [("Shape", ["x"], {}), narrow("0"), ("Concat", ["1", "k"], {"axis": 0}), ("ReduceProd", ["2"], {})],
        {"k": np.array([2**31 - 1], np.int32)},
    ),
    ([("Shape", ["x"], {}), ("Cast", ["0"], {"to": FLOAT}), ("Div", ["1", "z"], {})], {"z": np.float32(0)}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("compiled", [False, True])
def test_a_known_number_is_that_of_onnxruntime(case: int, compiled: bool) -> None:
    proto = model(*CASES[case])
    module = OnnxModule(proto)
    x = torch.zeros(3)
    (expected,) = run_onnxruntime(proto, (x,))
    found = torch.compile(module, backend="eager", fullgraph=True)(x) if compiled else module(x)
    assert_close(found[0], torch.from_numpy(expected), str(CASES[case][0]))
