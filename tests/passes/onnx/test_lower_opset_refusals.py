"""Nodes that an older opset has no form for, each for its own reason, and their neighbours that it has one for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from ort_dynamo.errors import OpsetError
from ort_dynamo.passes.onnx.lower_opset import LowerOpset


def parsed(body: str, opset: int) -> ir.Model:
    return ir.from_onnx_text(f'<ir_version: 8, opset_import: ["" : {opset}, "other" : 1]>\n{body}')


def of_node(signature: str, node: str, opset: int) -> ir.Model:
    """A model of one node, whose results it returns."""
    model = parsed(f"g ({signature}) => () {{ {node} }}", opset)
    model.graph.outputs.extend(model.graph.node(-1).outputs)
    return model


def described(model: ir.Model) -> list[Any]:
    return [(one.op_type, dict(one.attributes), list(one.inputs), list(one.outputs)) for one in model.graph]


NORM = "y, a, v = BatchNormalization <training_mode = 1> (x, w, w, m, m)"
MAP = "y = SequenceMap (x) <body = b (float[2] a) => (float[2] c) { c = Relu (a) }>"
RESHAPE = "y = Reshape <allowzero = 1> (x, s)"


@pytest.mark.parametrize(
    ("signature", "node", "opset", "version", "reason"),
    [
        ("float[2] x", "y = Nope (x)", 20, 17, "opset 20 has no such operator"),
        ("float[2] x", "y = Relu (x)", 11, 12, "its opset 11 has no older one to take its place: the oldest is 12"),
        ("float[2] x", "y = Relu (x)", 13, 14, "only opsets 12 to 13 can take the place of its 13"),
        ("float[2] x", "y = Cast <to = 7> (x)", 24, 20, "what opset 24 changed about it is not known here"),
        ("float[2, 2, 3, 4] x, int64[4] s", "y = AffineGrid (x, s)", 20, 12, "it stands for others, which have none: "),
        ("seq(float[2]) x", MAP, 18, 16, "it is of opset 17"),
        (
            "float[2, 3] x, int64[1] a",
            "y = Unsqueeze (x, a)",
            13,
            12,
            "its input axes was an attribute, and is not const",
        ),
        ("seq(bfloat16[2]) x", "y = Identity (x)", 19, 13, "opset 13 has no seq(tensor(bfloat16)) for input"),
        ("optional(float[2]) x", "y = Identity (x)", 16, 15, "opset 15 has no optional(tensor(float)) for input"),
        ("float16[2, 3] x, float16[3] w, float[3] m", NORM, 15, 14, "its statistics were not computed in float"),
        ("float[2, 3] x, int64[n] s", RESHAPE, 14, 13, "and how many sizes there are is not known"),
        ("float[1, 6, 2] x", "y = DFT (x)", 20, 19, "its axis was counted otherwise where none was given"),
        ("float[1, 1, 4, 4] x, float[4] s", "y = Resize <axes = [0, 1, 2, 3]> (x, , s)", 20, 17, "its attribute axes"),
        ("float[2, 3] x, int64[4] p, int64[1] k", "y = Pad (x, p, , k)", 18, 17, "which these are is not known"),
        ("float[2, 3] x, float[1] s, uint8[1] z", "y = QuantizeLinear (x, s, z)", 13, 12, "its scale was a scalar"),
        ("bfloat16[2, 3] x, bfloat16[3] s", "y = PRelu (x, s)", 16, 15, "opset 15 has no tensor(bfloat16) for X"),
    ],
)
def test_a_node_without_an_older_form_is_refused(
    signature: str, node: str, opset: int, version: int, reason: str
) -> None:
    model = of_node(signature, node, opset)
    before = described(model)
    with pytest.raises(OpsetError) as error:
        LowerOpset(version)(model)
    assert reason in str(error.value)
    assert described(model) == before


@pytest.mark.parametrize(
    ("signature", "node", "opset", "version"),
    [
        ("float[2, 3] x, float[3] w, float[3] m", NORM, 15, 14),
        ("float16[2, 3] x, float16[3] w", "y = BatchNormalization (x, w, w, w, w)", 15, 13),
        ("float[1, 1, 4, 4] x", "y = LpPool <kernel_shape = [2, 2]> (x)", 22, 21),
        ("float[2, 1] x", "y = Squeeze (x)", 13, 12),
        ("float[2, 3] x, float s, uint8 z", "y = QuantizeLinear (x, s, z)", 13, 12),
        ("float[2, 3] x, int64[4] p", "y = Pad (x, p)", 18, 17),
    ],
)
def test_a_node_that_means_the_same_stays(signature: str, node: str, opset: int, version: int) -> None:
    model = of_node(signature, node, opset)
    before = described(model)
    LowerOpset(version)(model)
    assert described(model) == before


def test_coordinates_of_regions_that_are_the_older_ones_need_no_attribute() -> None:
    regions = 'RoiAlign <coordinate_transformation_mode = "{}"> (x, r, b)'
    body = "g (float[1, 1, 4, 4] x, float[1, 4] r, int64[1] b) => (float[1, 1, 1, 1] y) {{ y = {} }}"
    model = parsed(body.format(regions.format("output_half_pixel")), 20)
    LowerOpset(15)(model)
    (node,) = model.graph
    assert "coordinate_transformation_mode" not in node.attributes
    with pytest.raises(OpsetError, match="shifted by half a pixel"):
        LowerOpset(15)(parsed(body.format(regions.format("half_pixel")), 20))


def test_nodes_beside_one_that_is_refused_stay_as_they_are() -> None:
    model = parsed("g (float[2] x, int32[2] i) => (float[2] y, int32[2] z) { y = Gelu (x) z = BitwiseNot (i) }", 20)
    with pytest.raises(OpsetError, match="BitwiseNot"):
        LowerOpset(17)(model)
    assert [node.op_type for node in model.graph] == ["Gelu", "BitwiseNot"]
    (x, _) = model.graph.inputs
    assert [reader.op_type for reader, _ in x.uses()] == ["Gelu"]


def test_a_definition_that_depends_on_a_type_needs_it() -> None:
    body = "g (float[2] x) => (float[2] z) { a = other.Some (x) y = Gelu (a) z = other.Some (y) }"
    with pytest.raises(OpsetError, match="a type that is not known"):
        LowerOpset(18)(parsed(body, 20))


@pytest.mark.parametrize("version", [14, 18, 21])
def test_inputs_and_results_that_are_left_out_stay_so(version: int) -> None:
    """Attention without a mask and with a cache: softmax(q k' / sqrt(4)) v, and the keys with those of the cache."""
    body = """g (float[1, 2, 3, 4] q, float[1, 2, 3, 4] k, float[1, 2, 3, 4] v, float[1, 2, 5, 4] pk,
        float[1, 2, 5, 4] pv) => (float[1, 2, 3, 4] y, float[1, 2, 8, 4] new) {
        y, , new = Attention (q, k, v, , pk, pv) }"""
    model = parsed(body, 23)
    assert LowerOpset(version)(model).modified
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    draws = np.random.default_rng(0)
    feeds = {one.name: draws.normal(size=[*one.shape]).astype(np.float32) for one in model.graph.inputs}
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    found, new = session.run(None, feeds)
    keys, values = (np.concatenate([feeds[f"p{name}"], feeds[name]], 2) for name in "kv")
    scores = np.exp(feeds["q"] @ keys.swapaxes(2, 3) / 2)
    np.testing.assert_allclose(found, scores / scores.sum(-1, keepdims=True) @ values, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(new, values)
