"""Tests of the element counts of ONNX values."""

from __future__ import annotations

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.element_counts import ElementCounts, Size


def sizes(text: str) -> dict[str, Size]:
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 20]>\n{text}')
    counts = ElementCounts(model)
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    return {str(value.name): counts[value] for value in values}


def test_a_size_is_a_number_times_symbols() -> None:
    found = sizes("g (float[2, 3] x, float[2, m, 5, k] y, float z) => (float[2, 3] r) { r = Neg (x) }")
    assert found == {"x": Size(6), "y": Size(10, ("k", "m")), "z": Size(1), "r": Size(6)}


def test_reshapes_and_casts_pass_sizes_on_in_both_directions() -> None:
    text = """g (float[2, k] x, int64[s] s) => (float16[7] r) {
        a = Reshape (x, s) b = Transpose (a) c = Exp (b) d = Squeeze (c) r = Cast <to = 10> (d) }"""
    found = sizes(text)
    assert {found[name] for name in "xab"} == {Size(2, ("k",))}
    assert {found[name] for name in "cdr"} == {Size(7)}  # Exp keeps sizes, too, but is not in the list


def test_an_unknown_size_equals_only_the_sizes_connected_with_it() -> None:
    found = sizes("g (float[?, 2] x, float[?, 2] y) => (float[?, 2] r) { a = Neg (x) b = Exp (a) r = Neg (b) }")
    assert found["x"] == found["a"]
    assert found["b"] == found["r"]
    assert len({found["x"], found["y"], found["b"]}) == 3
