"""ONNX Runtime's optimizers change no output on CUDA: the pattern of each fusion, beside the CPU's provider without it.

Nothing runs without a device. The optimizers that are left out for their defects are left out here, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from ort_dynamo.runtime.capabilities import omitted_optimizers
from ort_dynamo.runtime.importing import onnxruntime
from ort_dynamo.runtime.providers import find_target

pytestmark = pytest.mark.cuda

MODELS = {
    "SkipLayerNormFusion": """(float[2,3,8] x, float[2,3,8] y, float[8] s, float[8] b)
        => (float[2,3,8] o, float[2,3,1] m, float[2,3,1] r)
        { a = Add (x, y)  o, m, r = LayerNormalization (a, s, b) }""",
    "LayerNormFusion, rows of one": """(float[2,3,1] x, float[1] s, float[1] b) => (float[2,3,1] o)
        <float two = {2.0}, float little = {0.00001}, int64[1] last = {-1}>
        { m = ReduceMean (x, last)  c = Sub (x, m)  p = Pow (c, two)  v = ReduceMean (p, last)  e = Add (v, little)
          d = Sqrt (e)  n = Div (c, d)  t = Mul (n, s)  o = Add (t, b) }""",
    "SimplifiedLayerNormFusion": """(float[2,3,8] x, float[8] s) => (float[2,3,8] o)
        <float two = {2.0}, float little = {0.00001}, int64[1] last = {-1}>
        { p = Pow (x, two)  v = ReduceMean (p, last)  e = Add (v, little)  d = Sqrt (e)
          n = Div (x, d)  o = Mul (n, s) }""",
    "BiasGeluFusion": """(float[3,8] x, float[8] b) => (float[3,8] o) { a = Add (x, b)  o = Gelu (a) }""",
    "GeluFusion": """(float[3,8] x) => (float[3,8] o)
        <float root = {1.4142135381698608}, float one = {1.0}, float half = {0.5}>
        { d = Div (x, root)  e = Erf (d)  a = Add (e, one)  m = Mul (x, a)  o = Mul (m, half) }""",
    "FastGeluFusion": """(float[3,8] x) => (float[3,8] o) { o = Gelu <approximate = "tanh"> (x) }""",
    "QuickGeluFusion": """(float[3,8] x) => (float[3,8] o) <float scale = {1.702}>
        { a = Mul (x, scale)  s = Sigmoid (a)  o = Mul (x, s) }""",
    "BiasSoftmaxFusion": """(float[2,4,6,6] x, float[2,1,1,6] b) => (float[2,4,6,6] o)
        { a = Add (x, b)  o = Softmax <axis = -1> (a) }""",
    "MatmulTransposeFusion": """(float[2,5,3] x, float[2,5,4] y) => (float[2,3,4] o)
        { t = Transpose <perm = [0, 2, 1]> (x)  o = MatMul (t, y) }""",
    "MatMulScaleFusion": """(float[2,3,5] x, float[2,5,4] y) => (float[2,3,4] o) <float scale = {0.125}>
        { m = MatMul (x, y)  o = Mul (m, scale) }""",
    "ConvActivationFusion": """(float[2,4,8,8] x, float[4,4,3,3] w, float[4] b, float[2,4,8,8] z) => (float[2,4,8,8] o)
        { c = Conv <pads = [1, 1, 1, 1]> (x, w, b)  a = Add (c, z)  o = Relu (a) }""",
    "GatherToSplitFusion": """(float[2,3,8] x) => (float[2,8] o, float[2,8] p, float[2,8] q)
        <int64 a = {0}, int64 b = {1}, int64 c = {2}>
        { o = Gather <axis = 1> (x, a)  p = Gather <axis = 1> (x, b)  q = Gather <axis = 1> (x, c) }""",
}


@pytest.mark.parametrize("name", MODELS)
def test_an_optimizer_changes_no_output(name: str) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> test {MODELS[name]}')
    onnx.checker.check_model(model)
    generator = np.random.default_rng(0)
    feeds = {
        value.name: generator.normal(size=[dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype("f4")
        for value in model.graph.input
    }
    expected = results(model, feeds, "CPUExecutionProvider", optimized=False)
    for ours, theirs in zip(results(model, feeds, "CUDAExecutionProvider", optimized=True), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def results(model: onnx.ModelProto, feeds: Any, provider: str, *, optimized: bool) -> list[Any]:
    ort = onnxruntime()
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    left_out = omitted_optimizers([ir.DataType.FLOAT], find_target("cuda")) if optimized else []
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=[provider], disabled_optimizers=left_out
    )
    found: list[Any] = session.run(None, feeds)
    return found
