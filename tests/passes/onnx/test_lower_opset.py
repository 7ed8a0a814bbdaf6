"""Graphs before and after, nodes without an older form, and equal results of both graphs in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from ort_dynamo.errors import OpsetError
from ort_dynamo.passes.onnx.lower_opset import LowerOpset
from ort_dynamo.testing import assert_rewrites


def text(body: str, opset: int = 20) -> str:
    return f'<ir_version: 8, opset_import: ["" : {opset}]>\n{body}'


def parsed(body: str, opset: int = 20) -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(ir.from_onnx_text(text(body, opset)))))


def refusal(body: str, version: int, opset: int = 20) -> str:
    model = parsed(body, opset)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    with pytest.raises(OpsetError) as error:
        LowerOpset(version)(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before, "a model without a form was changed"
    return str(error.value)


# -- the general rule ----------------------------------------------------------------------------------------------


def test_nodes_that_fit_the_older_schema_stay() -> None:
    body = "g (float[2, 3] x, float[3, 4] w) => (float[2, 4] y) { a = MatMul (x, w) y = Relu (a) }"
    assert_rewrites(LowerOpset(13), text(body), text(body, 13))


def test_a_model_of_the_opset_is_not_modified() -> None:
    body = text("g (float[2] x) => (float[2] y) { y = LayerNormalization (x, x) }")
    assert_rewrites(LowerOpset(20), body, body)


def test_the_domain_may_have_its_long_name() -> None:
    before = text("g (float[3, 4] x) => (int64[1] y) { y = Shape <start: int = 1> (x) }").replace('""', '"ai.onnx"')
    model = ir.from_onnx_text(before)
    assert LowerOpset(12)(model).modified
    assert dict(model.opset_imports) == {"": 12}
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [node.op_type for node in model.graph] == ["Shape", "Constant", "Constant", "Slice"]


def test_an_attribute_with_its_default_value_is_removed() -> None:
    body = "g (float[2] x, int64[2] i, float[2] u) => (float[2] y) {{ y = ScatterElements {}(x, i, u) }}"
    before, after = body.format('<reduction: string = "none", axis: int = 0>'), body.format("<axis: int = 0>")
    assert_rewrites(LowerOpset(14), text(before), text(after, 14))


def test_an_attribute_that_says_more_is_refused() -> None:
    body = (
        'g (float[2] x, int64[2] i, float[2] u) => (float[2] y) { y = ScatterElements <reduction = "add"> (x, i, u) }'
    )
    assert "ScatterElements (y): opset 14 does not know its attribute reduction='add'" in refusal(body, 14)
    assert "reduction='add'" in refusal(body, 15)
    assert_rewrites(LowerOpset(16), text(body), text(body, 16))
    assert "its reduction 'max' is of opset 18" in refusal(body.replace("add", "max"), 17)


def test_a_type_of_a_newer_opset_is_refused() -> None:
    body = "g (bool c, {0}[2] x) => ({0}[2] y) {{ y = Where (c, x, x) }}"
    assert "Where (y): opset 15 has no tensor(bfloat16) for X" in refusal(body.format("bfloat16"), 15)
    assert_rewrites(LowerOpset(15), text(body.format("float")), text(body.format("float"), 15))


def test_a_type_that_a_rewrite_cannot_have_is_refused() -> None:
    body = "g (bool[2, 3] x) => (bool[2, 1] y) { axes = Constant <value_ints = [1]> () y = ReduceMax (x, axes) }"
    assert "opset 17 has no tensor(bool) for data" in refusal(body, 17)


def test_an_input_may_be_left_out_where_the_older_opset_has_it_optional() -> None:
    clip = "g (float[2] x, float m) => (float[2] y) { y = Clip (x, , m) }"
    assert_rewrites(LowerOpset(12), text(clip), text(clip, 12))
    resize = "g (float[1, 1, 2, 2] x, float[4] s) => (float[1, 1, 4, 4] y) { y = Resize (x, , s) }"
    assert "its input roi may be left out only after opset 12" in refusal(resize, 12)
    assert_rewrites(LowerOpset(18), text(resize, 18), text(resize, 18))


def test_every_operator_without_a_form_is_named() -> None:
    body = """g (int32[2] x, bool c) => (int32[2] y, int32[2] z) {
        y = BitwiseAnd (x, x)
        z = If (c) <
            then_branch = t () => (int32[2] a) { a = BitwiseNot (y) },
            else_branch = e () => (int32[2] b) { b = Identity (y) }
        >
    }"""
    message = refusal(body, 17)
    assert "BitwiseAnd (y): it is of opset 18; BitwiseNot (a): it is of opset 18" in message


@pytest.mark.parametrize("version", [11, 21])
def test_an_opset_that_is_not_known_or_newer_is_refused(version: int) -> None:
    assert "only opsets 12 to 20" in refusal("g (float[2] x) => (float[2] y) { y = Relu (x) }", version)


def test_operators_of_other_domains_stay() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 20, "com.microsoft" : 1]>\n'
        "g (float[2] x) => (float[2] y) { y = com.microsoft.Gelu (x) }"
    )
    assert LowerOpset(13)(model).modified
    assert [(node.domain, node.op_type) for node in model.graph] == [("com.microsoft", "Gelu")]
    assert model.opset_imports == {"": 13, "com.microsoft": 1}


# -- meanings that have changed ------------------------------------------------------------------------------------


def test_softmax_of_the_last_axis_stays_before_opset_13() -> None:
    body = "g (float[2, 3] x) => (float[2, 3] y) {{ y = Softmax {}(x) }}"
    after = text(body.format("<axis = -1>"), 12)
    assert_rewrites(LowerOpset(12), text(body.format("")), after)
    last = body.format("<axis = 1>")
    assert_rewrites(LowerOpset(12), text(last), text(last, 12))


@pytest.mark.parametrize(
    ("node", "version", "reason"),
    [
        ("Hardmax <axis = 0> (x)", 12, "before opset 13 its axis 0 stood for all axes from there on"),
        ("AveragePool <kernel_shape = [2, 2], ceil_mode = 1> (x)", 18, "ceil_mode"),
        ('GridSample <mode = "linear"> (x, x)', 15, "it is of opset 16"),
        ('Pad <mode = "wrap"> (x, pads)', 18, "its mode 'wrap' is of opset 19"),
        ('Pad <mode = "wrap"> (x, pads, , k)', 17, "its mode 'wrap' is of opset 19"),
        ("Pad (x, pads, , i)", 17, "its pads were of all axes, and which these are is not known"),
        ("DequantizeLinear (q, s, q)", 12, "its scale was a scalar"),
        ("QuantizeLinear (x, s)", 12, "its scale was a scalar"),
        ("GridSample (v, i5)", 19, "its input had four dimensions"),
        ("RoiAlign (x, r, i)", 15, "its coordinates were not shifted by half a pixel"),
        ("Split <num_outputs = 1> (u)", 12, "the sizes of its parts were an attribute"),
        ("MaxPool <kernel_shape = [2, 2], ceil_mode = 1> (x)", 21, "ceil_mode"),
        ("LpPool <kernel_shape = [2, 2], ceil_mode = 1> (x)", 21, "ceil_mode"),
    ],
)
def test_nodes_with_another_meaning_in_the_older_opset_are_refused(node: str, version: int, reason: str) -> None:
    inputs = """float[1, 1, 4, 2] x, int64[8] pads, int64[n] i, uint8[2] q, float[2] s, float[n, 4] r,
        float[1, 1, 2, 2, 2] v, float[1, 2, 2, 2, 3] i5, float[m] u"""
    body = f"g ({inputs}) => (y) {{ k = Constant <value_ints = [0]> () y = {node} }}"
    assert reason in refusal(body, version, 23)


def test_average_pools_of_whole_windows_stay() -> None:
    body = "g (float[1, 1, 4, 4] x) => (float[1, 1, 2, 2] y) {{ y = AveragePool <kernel_shape = [2, 2], {}> (x) }}"
    before = body.format("strides = [2, 2], dilations = [1, 1]")
    assert_rewrites(LowerOpset(18), text(before), text(body.format("strides = [2, 2]"), 18))


# -- forms of their own --------------------------------------------------------------------------------------------


def test_constant_axes_become_an_attribute() -> None:
    body = "g (float[2, 3] x) => (float[2] y) {{ {} }}"
    before = body.format("axes = Constant <value_ints = [1]> () y = ReduceMean <keepdims = 0> (x, axes)")
    after = body.format("y = ReduceMean <axes = [1], keepdims = 0> (x)")
    assert_rewrites(LowerOpset(17), text(before), text(after, 17))
    assert_rewrites(LowerOpset(18), text(before), text(before, 18))


def test_axes_that_are_computed_stay_inputs_and_are_refused_where_there_is_none() -> None:
    body = "g (float[2, 3] x, int64[1] axes) => (float[a, b] y) { y = ReduceMean (x, axes) }"
    assert "ReduceMean (y): its input axes was an attribute, and is not constant" in refusal(body, 17)


def test_axes_that_two_nodes_read_stay_for_the_other() -> None:
    body = """g (float[2, 3] x) => (float[2, 1] y, float[2, 1] z) {{
        axes = Constant <value_ints = [1]> ()
        y = {}
        z = ReduceSum (x, axes)
    }}"""
    after = text(body.format("ReduceMax <axes = [1], keepdims = 1> (x)"), 17)
    assert_rewrites(LowerOpset(17), text(body.format("ReduceMax (x, axes)")), after)


def test_unsqueeze_and_squeeze_get_attributes_before_opset_13() -> None:
    before = """g (float[2] x) => (float[2] y) {
        axes = Constant <value_ints = [0]> ()
        a = Unsqueeze (x, axes)
        y = Squeeze (a, axes)
    }"""
    after = "g (float[2] x) => (float[2] y) { a = Unsqueeze <axes = [0]> (x) y = Squeeze <axes = [0]> (a) }"
    assert_rewrites(LowerOpset(12), text(before), text(after, 12))


def test_a_part_of_a_shape_is_sliced() -> None:
    before = "g (float[n, 3] x) => (int64[1] y) { y = Shape <start = 0, end = 1> (x) }"
    after = """g (float[n, 3] x) => (int64[1] y) {
        "y/Shape" = Shape (x)
        "y/Constant" = Constant <value: tensor = int64[1] {0}> ()
        "y/Constant_2" = Constant <value: tensor = int64[1] {1}> ()
        y = Slice ("y/Shape", "y/Constant", "y/Constant_2")
    }"""
    assert_rewrites(LowerOpset(14), text(before), text(after, 14))
    assert_rewrites(LowerOpset(15), text(before), text(before, 15))


def test_a_reshape_that_cannot_see_a_zero_loses_allowzero() -> None:
    body = "g (float[2, 3] x) => (float[3, 2] y) {{ s = Constant <value_ints = [3, 2]> () y = Reshape {}(x, s) }}"
    assert_rewrites(LowerOpset(13), text(body.format("<allowzero = 1>")), text(body.format(""), 13))


def test_a_reshape_whose_zero_is_the_inputs_keeps_its_shape() -> None:
    body = "g (float[n, 4] x, int64[3] s) => (float[n, 2, 2] y) {{ y = Reshape {}(x, s) }}"
    assert_rewrites(LowerOpset(13), text(body.format("<allowzero = 1>")), text(body.format(""), 13))


def test_a_reshape_finds_the_one_size_that_may_be_zero() -> None:
    before = "g (float[m] x, int64[2] s) => (float[n, 4] y) { y = Reshape <allowzero = 1> (x, s) }"
    after = """g (float[m] x, int64[2] s) => (float[n, 4] y) {
        "y/Constant" = Constant <value: tensor = int64[2] {-1, 4}> ()
        y = Reshape (x, "y/Constant")
    }"""
    assert_rewrites(LowerOpset(13), text(before), text(after, 13))


def test_branches_are_lowered_with_constants_of_the_outer_graph() -> None:
    before = """g (bool c, float[2, 3] x) => (float[2, 1] y) {
        axes = Constant <value_ints = [1]> ()
        y = If (c) <
            then_branch = t () => (float[2, 1] a) { a = ReduceMax (x, axes) },
            else_branch = e () => (float[2, 1] b) { b = ReduceSum (x, axes) }
        >
    }"""
    after = before.replace("ReduceMax (x, axes)", "ReduceMax <axes = [1], keepdims = 1> (x)")
    assert_rewrites(LowerOpset(17), text(before), text(after, 17))


def test_operators_that_onnx_defines_by_others_become_these() -> None:
    model = parsed("g (float[2, 3] x, float[3] w) => (float[2, 3] y) { a = Gelu (x) y = LayerNormalization (a, w) }")
    assert LowerOpset(14)(model).modified
    made = [node.op_type for node in model.graph]
    assert "Erf" in made
    assert not {"Gelu", "LayerNormalization"} & set(made)
    for names in ([node.name for node in model.graph], [one.name for node in model.graph for one in node.outputs]):
        assert all(names)
        assert len(set(names)) == len(names)


def test_names_that_it_makes_are_new() -> None:
    body = """g (float[2, 3] x) => (float[2, 3] y, int64[1] z) {
        a = Relu (x) b = Relu (a) y = Gelu (b) z = Shape <start = 0, end = 1> (b) }"""

    def names(model: ir.Model) -> list[str]:
        nodes = [one for graph in (model.graph, *model.graph.subgraphs()) for one in graph]
        return [str(one.name) for one in (*nodes, *(value for node in nodes for value in node.outputs)) if one.name]

    model = parsed(body)
    given = set(names(model))
    LowerOpset(14)(model)
    made = sorted(set(names(model)) - given)
    assert len(made) > 2
    for name in made:
        of_node, of_value = parsed(body), parsed(body)
        of_node.graph.node(0).name = of_value.graph.node(0).outputs[0].name = name
        for one in (of_node, of_value):
            LowerOpset(14)(one)
            nodes = [node.name for node in one.graph if node.name]
            values = [value.name for node in one.graph for value in node.outputs]
            assert len(set(nodes)) == len(nodes)
            assert len(set(values)) == len(values)


def test_values_in_the_branches_of_a_definition_hide_none() -> None:
    def lowered(name: str) -> tuple[set[str | None], set[str | None]]:
        ends = "(float[1, 2, 3] x, int64[4] s) => (float[1, 4, 5, 2] y, float[1, 2, 3] z)"
        model = parsed(f"g {ends} {{ z = Neg (x) y = AffineGrid (x, s) }}")
        model.graph.node(0).outputs[0].name = name
        LowerOpset(18)(model)
        inner = {value.name for graph in model.graph.subgraphs() for node in graph for value in node.outputs}
        return {value.name for node in model.graph for value in node.outputs}, inner

    for name in sorted(map(str, lowered("z")[1]))[:3]:
        outer, inner = lowered(name)
        assert name in outer
        assert not outer & inner


def test_a_type_that_nobody_knows_is_refused_where_the_older_opset_has_fewer() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 20, "other" : 1]>\n'
        "g (float[2] x) => (float[2] z) { a = other.Some (x) y = Identity (a) z = other.Some (y) }"
    )
    with pytest.raises(OpsetError, match=r"Identity .*: the type of a is not known, and opset 13 does not take all"):
        LowerOpset(13)(model)


# -- the same numbers ----------------------------------------------------------------------------------------------

Array = npt.NDArray[np.generic]
RANDOM = np.random.default_rng(0)
FLOATS = RANDOM.normal(size=(2, 5, 4)).astype(np.float32)
IMAGE = RANDOM.normal(size=(1, 2, 4, 4)).astype(np.float32)
GRID = RANDOM.uniform(-1, 1, size=(1, 3, 3, 2)).astype(np.float32)
SIGNATURE = "float[a, b, c] x"


def ints(*numbers: int) -> Array:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize(
    ("signature", "nodes", "feeds", "version"),
    [
        (SIGNATURE, "y = Shape <start = -2> (x)", {"x": FLOATS}, 14),
        (SIGNATURE, "y = Shape <start = -9, end = 2> (x)", {"x": FLOATS}, 14),
        (SIGNATURE, "y = Shape <end = 2> (x)", {"x": FLOATS}, 14),
        (SIGNATURE, "y = Shape <end = -1> (x)", {"x": FLOATS}, 14),
        (SIGNATURE, "y, z = Split <num_outputs = 2> (x)", {"x": FLOATS}, 17),
        (SIGNATURE, "y, z, w = Split <axis = 1, num_outputs = 3> (x)", {"x": FLOATS}, 17),
        ("float[2, 5, 4] x", "y, z, w = Split <axis = -2, num_outputs = 3> (x)", {"x": FLOATS}, 17),
        ("float[2, 5, 4] x", "y, z = Split <axis = 2, num_outputs = 2> (x)", {"x": FLOATS}, 12),
        (
            f"{SIGNATURE}, int64[2] p",
            "k = Constant <value_ints = [-2]> () y = Pad (x, p, , k)",
            {"x": FLOATS, "p": ints(1, 2)},
            17,
        ),
        (
            SIGNATURE,
            "k = Constant <value_ints = [2, 0]> () p = Constant <value_ints = [1, 0, 2, 1]> () "
            'y = Pad <mode = "edge"> (x, p, , k)',
            {"x": FLOATS},
            17,
        ),
        (f"{SIGNATURE}, int64[2] s", "y = Reshape <allowzero = 1> (x, s)", {"x": FLOATS, "s": ints(8, 5)}, 13),
        (f"{SIGNATURE}, int64[2] s", "y = Reshape <allowzero = 1> (x, s)", {"x": FLOATS[:0], "s": ints(3, 0)}, 13),
        (f"{SIGNATURE}, int64[3] s", "y = Reshape <allowzero = 1> (x, s)", {"x": FLOATS[:0], "s": ints(0, 7, 0)}, 13),
        (f"{SIGNATURE}, int64[2] s", "y = Reshape <allowzero = 1> (x, s)", {"x": FLOATS[:0], "s": ints(-1, 7)}, 13),
        (SIGNATURE, "y = ReduceMax (x)", {"x": FLOATS}, 17),
        (SIGNATURE, "k = Constant <value_ints = [-1, 0]> () y = ReduceSumSquare (x, k)", {"x": FLOATS}, 13),
        ("float[1, 2, 4, 4] x, float[1, 3, 3, 2] g", "y = GridSample (x, g)", {"x": IMAGE, "g": GRID}, 16),
        (
            "float[1, 2, 4, 4] x, float[1, 3, 3, 2] g",
            'y = GridSample <mode = "cubic", align_corners = 1> (x, g)',
            {"x": IMAGE, "g": GRID},
            19,
        ),
        (SIGNATURE, "y = ReduceMean <keepdims = 0> (x)", {"x": FLOATS}, 17),
        (SIGNATURE, "y = LogSoftmax <axis = 1> (x)", {"x": FLOATS}, 12),
        (SIGNATURE, 'y = Gelu <approximate = "tanh"> (x)', {"x": FLOATS}, 13),
        (SIGNATURE, "y = Mish (x)", {"x": FLOATS}, 13),
        (SIGNATURE, "y = HardSwish (x)", {"x": FLOATS}, 13),
        (
            f"{SIGNATURE}, float[5, 4] w",
            "y, m, s = LayerNormalization <axis = 1> (x, w)",
            {"x": FLOATS, "w": FLOATS[0]},
            12,
        ),
        (SIGNATURE, "k = Constant <value_int = 1> () y = CastLike (x, k)", {"x": FLOATS}, 14),
    ],
)
def test_the_older_form_gives_the_same(signature: str, nodes: str, feeds: dict[str, Array], version: int) -> None:
    model = ir.from_onnx_text(text(f"g ({signature}) => () {{ {nodes} }}"))
    model.graph.outputs.extend(model.graph.node(-1).outputs)
    before = onnx.shape_inference.infer_shapes(ir.to_proto(model))
    lowered = ir.from_proto(before)
    assert LowerOpset(version)(lowered).modified
    after = ir.to_proto(lowered)
    onnx.checker.check_model(after, full_check=True)
    assert [entry.version for entry in after.opset_import] == [version]
    expected, found = (
        onnxruntime.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
        for one in (before, after)
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "version"), [("ReduceSum", 12), ("ReduceMin", 17), ("ReduceMean", 13)])
def test_a_reduction_of_no_axes_that_does_nothing_still_does_nothing(name: str, version: int) -> None:
    # By itself: ONNX Runtime 1.19.2 runs these operators wrongly, so it is no reference.
    lowered = parsed(f"g ({SIGNATURE}) => (float[a, b, c] y) {{ y = {name} <noop_with_empty_axes = 1> (x) }}")
    assert LowerOpset(version)(lowered).modified
    after = ir.to_proto(lowered).SerializeToString()
    (found,) = onnxruntime.InferenceSession(after, providers=["CPUExecutionProvider"]).run(None, {"x": FLOATS})
    np.testing.assert_array_equal(found, FLOATS)
