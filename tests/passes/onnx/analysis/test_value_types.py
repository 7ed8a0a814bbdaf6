"""Types that inference adds to a model, of tensors and of other values."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ort_dynamo.passes.onnx import LowerOpset, PropagateCasts
from ort_dynamo.passes.onnx.analysis.value_types import infer_missing_types
from ort_dynamo.runtime.installed.importing import onnxruntime

HEADER = '<ir_version: 9, opset_import: ["" : 20, "ai.onnx.ml" : 3]>\n'
FLOAT = ir.TensorType(ir.DataType.FLOAT)
BODIES = {
    "split": "s = SplitToSequence <axis = 0> (w) y = ConcatFromSequence <axis = 0> (s)",
    "construct": "s = SequenceConstruct (w, x) i = Constant <value_int = 0> () y = SequenceAt (s, i)",
    "insert": "e = SequenceEmpty () s = SequenceInsert (e, w) i = Constant <value_int = 0> () y = SequenceAt (s, i)",
    "optional": "s = Optional (w) y = OptionalGetElement (s)",
    "branch": """c = Constant <value = bool {1}> () i = Constant <value_int = 0> () s = If (c) <
        then_branch = t () => (seq(float[3, 4]) a) { a = SequenceConstruct (w) },
        else_branch = e () => (seq(float[3, 4]) b) { n = Neg (x) q = SequenceConstruct (n) b = Identity (q) }
    > y = SequenceAt (s, i)""",
}


def model_of(body: str) -> ir.Model:
    text = "g (float[3, 4] x) => (float[3, 4] y) { h = Cast <to = 10> (x) w = Cast <to = 1> (h) %s }"
    return ir.from_onnx_text(HEADER + text % body)


@pytest.mark.parametrize("pass_", [PropagateCasts(), LowerOpset(17)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_sequences_and_optionals_stay_so(body: str, pass_: ir.passes.InPlacePass) -> None:
    model = model_of(body)
    x = {"x": np.random.default_rng(0).standard_normal((3, 4), np.float32)}
    results = []
    for _ in range(2):
        proto = ir.to_proto(model)
        onnx.checker.check_model(proto, full_check=True)
        session = onnxruntime().InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        results.append(session.run(None, x)[0])
        pass_(model)
    np.testing.assert_array_equal(*results)


def test_each_value_gets_its_own_type() -> None:
    model = model_of(BODIES["branch"] + "o = Optional (s)")
    infer_missing_types(model)
    found = {value.name: value.type for node in model.graph.all_nodes() for value in node.outputs}
    wanted = {"s": ir.SequenceType(FLOAT), "q": ir.SequenceType(FLOAT), "n": FLOAT, "w": FLOAT}
    assert {name: found[name] for name in wanted} == wanted
    assert found["o"] == ir.OptionalType(ir.SequenceType(FLOAT))


def test_a_map_has_no_type() -> None:
    model = model_of("s = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1, 2, 3]> (w) y = Neg (w)")
    infer_missing_types(model)
    found = {value.name: value.type for node in model.graph for value in node.outputs}
    assert (found["s"], found["y"]) == (None, FLOAT)


def test_large_initializers_keep_their_data_and_order() -> None:
    numbers = ", ".join(map(str, range(600)))
    text = f"""{HEADER}g (float[n, 600] x) => (float[n, 600] y)
        <float[600] large = {{{numbers}}}, float[1] small = {{1}}> {{ a = Add (x, large) y = Mul (a, small) }}"""
    model = ir.from_onnx_text(text)
    infer_missing_types(model)
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert list(model.graph.initializers) == ["large", "small"]
    np.testing.assert_array_equal(model.graph.initializers["large"].const_value.numpy(), np.arange(600))  # type: ignore[union-attr]
    (a,) = model.graph[0].outputs
    assert (a.type, a.shape) == (FLOAT, ir.Shape(["n", 600]))
