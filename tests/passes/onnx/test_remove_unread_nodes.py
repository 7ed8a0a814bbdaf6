"""Graph before, graph after."""

from __future__ import annotations

from ort_dynamo.passes.onnx.remove_unread_nodes import RemoveUnreadNodes
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def branches(made: str, result: str) -> str:
    return (
        HEADER
        + f"""g (bool p, float[2] x) => (float[2] y) {{
            y = Relu(x)
            {made}
            {result} = If(p) <
                then_branch = t () => (float[2] u) {{ u = Neg(a) }},
                else_branch = e () => (float[2] v) {{ v = Abs(x) }}
            >
        }}"""
    )


def test_nodes_read_only_by_an_unread_branch_are_removed() -> None:
    kept = HEADER + "g (bool p, float[2] x) => (float[2] y) { y = Relu(x) }"
    assert_rewrites(RemoveUnreadNodes(), branches("b = Exp(x) a = Neg(b)", "z"), kept)


def test_nodes_read_by_a_live_branch_stay() -> None:
    text = branches("a = Exp(x)", "z").replace("=> (float[2] y) {", "=> (float[2] y, float[2] z) {", 1)
    assert_rewrites(RemoveUnreadNodes(), text, text)


def test_unread_nodes_inside_a_branch_are_removed() -> None:
    text = branches("a = Exp(x)", "z").replace("=> (float[2] y) {", "=> (float[2] y, float[2] z) {", 1)
    assert_rewrites(RemoveUnreadNodes(), text.replace("{ u = Neg(a) }", "{ w = Exp(x) u = Neg(a) }"), text)
