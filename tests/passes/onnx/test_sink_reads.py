"""Graph before, graph after."""

from __future__ import annotations

from ort_dynamo.passes.onnx.sink_reads import SinkReads
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'


def graph(*lines: str) -> str:
    return HEADER + "g (float[2, 2] x, bool c) => (float[2, 2] y, float[2, 2] z) {\n" + "\n".join(lines) + "\n}"


A, B = "a = Neg (x)", "b = Exp (x)"
TURNED, TWICE = "turned = Transpose (b)", "twice = Transpose (turned)"
ABS, Y, Z = "abs = Abs (a)", "y = Sin (abs)", "z = Add (twice, abs)"


def test_reads_of_inputs_and_their_rearrangements_sink_to_their_reader() -> None:
    assert_rewrites(SinkReads(), graph(B, A, TURNED, TWICE, ABS, Y, Z), graph(A, ABS, Y, B, TURNED, TWICE, Z))


def test_the_first_of_several_readers_counts() -> None:
    read = "y = Sin (abs)", "z = Add (b, abs)", "unread = Mul (b, b)"
    assert_rewrites(SinkReads(), graph(B, A, ABS, *read), graph(A, ABS, read[0], B, *read[1:]))


def test_arithmetic_on_sinking_nodes_stays_in_place() -> None:
    log, y, z = "log = Log (b)", "y = Sin (log)", "z = Add (log, y)"
    assert_rewrites(SinkReads(), graph(A, B, log, ABS, y, z), graph(B, log, A, ABS, y, z))


def test_a_rearrangement_that_also_reads_a_computed_value_stays_in_place() -> None:
    sizes = "sizes = Shape (abs)"
    shaped, y, z = "shaped = Reshape (b, sizes)", "y = Sin (abs)", "z = Add (shaped, y)"
    before = graph(B, A, ABS, sizes, shaped, y, z)
    assert_rewrites(SinkReads(), before, graph(A, ABS, sizes, B, shaped, y, z))


def test_values_captured_by_a_branch_sink_to_it() -> None:
    branch = """z = If (c) <
        then_branch = t () => (float[2, 2] p) { p = Neg (turned) },
        else_branch = e () => (float[2, 2] q) { q = Abs (x) }
    >"""
    assert_rewrites(SinkReads(), graph(B, TURNED, A, ABS, Y, branch), graph(A, ABS, Y, B, TURNED, branch))


def test_nodes_that_are_only_returned_stay() -> None:
    model = graph("z = Exp (x)", "a = Sin (x)", "y = Abs (a)")
    assert_rewrites(SinkReads(), model, model)
