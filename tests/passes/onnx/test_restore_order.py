"""Graph before, graph after."""

from __future__ import annotations

import onnx_ir as ir

from ort_dynamo.passes.onnx.restore_order import RestoreOrder
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def graph(*lines: str) -> str:
    return HEADER + "g (float[2, 2] x, bool c) => (float[2, 2] y, float[2, 2] z) {\n" + "\n".join(lines) + "\n}"


A, B = "a = Neg (x)", "b = Exp (x)"
Y, Z = "y = Abs (a)", "z = Sin (b)"


def test_nodes_go_back_to_their_places() -> None:
    places = {name: place for place, name in enumerate(["a", "y", "b", "z"])}
    assert_rewrites(RestoreOrder(places), graph(A, B, Z, Y), graph(A, Y, B, Z))


def test_a_new_node_comes_right_after_its_inputs() -> None:
    new = "new = Cos (a)"
    places = {name: place for place, name in enumerate(["a", "b", "z", "y"])}
    assert_rewrites(
        RestoreOrder(places), graph(A, B, Z, new, "y = Abs (new)"), graph(A, new, B, Z, "y = Abs (new)"), {}
    )


def test_edges_win_over_places() -> None:
    places = {name: place for place, name in enumerate(["y", "a", "z", "b"])}
    assert_rewrites(RestoreOrder(places), graph(A, B, Y, Z), graph(A, Y, B, Z))


def test_values_captured_by_a_branch_come_before_it() -> None:
    branch = """y = If (c) <
        then_branch = t () => (float[2, 2] p) { p = Neg (b) },
        else_branch = e () => (float[2, 2] q) { q = Abs (x) }
    >"""
    places = {name: place for place, name in enumerate(["y", "z", "b"])}
    assert_rewrites(RestoreOrder(places), graph(B, Z, branch), graph(B, branch, Z))


def test_a_graph_in_order_is_left_alone() -> None:
    places = {name: place for place, name in enumerate(["a", "y", "b", "z"])}
    assert_rewrites(RestoreOrder(places), graph(A, Y, B, Z), graph(A, Y, B, Z))


def test_outputs_left_out_have_no_place() -> None:
    norm = "{0}, , s{0} = LayerNormalization (x, x, x)"
    model = ir.from_onnx_text(graph(norm.format("y"), A, norm.format("z")))
    assert RestoreOrder.of(model).places == {"y": 0, "sy": 0, "a": 1, "z": 2, "sz": 2}
    places = {"y": 0, "a": 1, "z": 2, "": 2}
    y, z = norm.format("y"), norm.format("z")
    assert_rewrites(RestoreOrder(places), graph(A, y, z), graph(y, A, z))
