"""Graph before, graph after, where tensors are padded between their entries, as in the gradient of `x[..., ::2]`."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from test_join_pads import HEADER, SPECIAL, ZERO, added, assert_keeps_bits

from ort_dynamo.passes.onnx.join_pads import JoinPads
from ort_dynamo.testing import assert_rewrites

PADS = "int64[6] second = {0, 0, 1, 0, 0, 0}, int64[6] first = {0, 0, 0, 0, 0, 1}, int64[2] flat = {4, 6}"

PAIRS = (
    HEADER
    + f"""
g (float[4, 3, 1] a, float[4, 3, 1] b) => (float[4, 6] y) <{PADS}> {{
    p = Pad (a, second)
    r = Reshape (p, flat)
    q = Pad (b, first)
    s = Reshape (q, flat)
    y = Add (r, s)
}}
"""
)


def test_entries_that_fill_pairs_are_joined_before_the_reshape() -> None:
    assert_rewrites(
        JoinPads(),
        PAIRS,
        HEADER
        + f"""
g (float[4, 3, 1] a, float[4, 3, 1] b) => (float[4, 6] y) <{PADS}, {ZERO}> {{
    y_pieces = Concat <axis: int = 2> (b, a)
    y_view = Reshape (y_pieces, flat)
    y = Add (y_view, zero_float)
}}
""",
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("s = Reshape (q, flat)", "s = Reshape (q, other)"),  # [1, 4, 6], which broadcasts
        ("y = Add (r, s)", "t = Neg (s)\n    y = Add (r, t)"),
        ("float[4, 6] y)", "float[4, 6] y, float[4, 6] r)"),
        ("p = Pad (a, second)", "p = Pad (a, first)"),  # both are the first entries of a pair
    ],
)
def test_other_sums_stay(old: str, new: str) -> None:
    text = PAIRS.replace("flat = {4, 6}", "flat = {4, 6}, int64[3] other = {1, 4, 6}").replace(old, new)
    text = text if "other)" not in new else text.replace("float[4, 6] y", "float[1, 4, 6] y")
    assert_rewrites(JoinPads(), text, text)


def test_short_runs_are_joined_with_zeros() -> None:
    assert_rewrites(
        JoinPads(short_runs=True),
        HEADER
        + """
g (float[4, 3, 1] a) => (float[4, 3, 4] y) <int64[6] pads = {0, 0, 1, 0, 0, 2}> {
    y = Pad (a, pads)
}
""",
        HEADER
        + """
g (float[4, 3, 1] a) => (float[4, 3, 4] y)
  <int64[6] pads = {0, 0, 1, 0, 0, 2}, int64[3] shape_0x0x0 = {0, 0, 0},
   int64[6] shape_0x0x0x4x3x1 = {0, 0, 0, 4, 3, 1}, int64[6] shape_0x0x0x4x3x2 = {0, 0, 0, 4, 3, 2}> {
    y_before_empty = Slice (a, shape_0x0x0, shape_0x0x0)
    y_before_zeros = Pad (y_before_empty, shape_0x0x0x4x3x1)
    y_after_empty = Slice (a, shape_0x0x0, shape_0x0x0)
    y_after_zeros = Pad (y_after_empty, shape_0x0x0x4x3x2)
    y = Concat <axis: int = 2> (y_before_zeros, a, y_after_zeros)
}
""",
    )


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("y = Pad (a, pads)", "4, 3, 2"),  # without `short_runs`
        ("y = Pad (long, pads)", "4, 3, 10"),
        ('y = Pad <mode: string = "edge"> (a, pads)', "4, 3, 2"),
        ("y = Pad (a, both)", "4, 4, 2"),
        ("y = Pad (a, negative)", "4, 3, 2"),
        ("y = Pad (a, pads, one)", "4, 3, 2"),
    ],
)
def test_other_pads_stay(line: str, shape: str) -> None:
    text = f"""{HEADER}
g (float[4, 3, 1] a, float[4, 3, 9] long) => (float[{shape}] y)
  <int64[6] pads = {{0, 0, 0, 0, 0, 1}}, int64[6] both = {{0, 1, 0, 0, 0, 1}},
   int64[6] negative = {{0, 0, -1, 0, 0, 2}}, float one = {{1}}> {{
    {line}
}}
"""
    assert_rewrites(JoinPads(short_runs=line != "y = Pad (a, pads)"), text, text)


@pytest.mark.parametrize("seed", range(60))
def test_random_pads_between_entries_keep_every_bit_and_sign(seed: int) -> None:
    random = np.random.default_rng(seed)
    lead, count, step = (int(random.integers(1, 5)) for _ in range(3))
    inner = [int(size) for size in random.integers(1, 5, random.integers(0, 3))]
    shape, rank = [lead, count, 1, *inner], 3 + len(inner)
    named = "N" if random.integers(2) else str(lead)
    sizes = ", ".join([named, *map(str, shape[1:])])
    whole = [lead, count * step, *inner]
    chosen = sorted(random.choice(step, int(random.integers(1, step + 1)), replace=False).tolist())
    lines, constants = [], [f"int64[{rank - 1}] flat = {{{', '.join(map(str, [0, *whole[1:]]))}}}"]
    for place in chosen:
        pads = [0] * (2 * rank)
        pads[2], pads[2 + rank] = place, step - 1 - place
        constants.append(f"int64[{2 * rank}] pads{place} = {{{', '.join(map(str, pads))}}}")
        lines += [f"p{place} = Pad (x{place}, pads{place})", f"r{place} = Reshape (p{place}, flat)"]
    terms = [f"r{place}" for place in chosen] + (["base"] if random.integers(2) else [])
    lines.append(f"y = Identity ({added(terms, lines, random)})")
    full = ", ".join([named, *map(str, whole[1:])])
    inputs = ", ".join([*(f"float[{sizes}] x{place}" for place in chosen), f"float[{full}] base"])
    text = f"{HEADER}\ng ({inputs}) => (float[{full}] y) <{', '.join(constants)}> {{\n"
    model = ir.from_onnx_text(text + "\n".join(lines) + "\n}")
    given = {f"x{place}": random.choice(SPECIAL, shape) for place in chosen} | {"base": random.choice(SPECIAL, whole)}
    short = bool(random.integers(2))
    is_short = short and np.prod(inner) <= 8
    changes = step > 1 and (len(chosen) == step or is_short)
    assert assert_keeps_bits(JoinPads(short_runs=short), model, given) == changes
    assert not JoinPads(short_runs=short)(model).modified  # a second run finds nothing


def test_a_base_that_broadcasts_has_a_shape_of_its_own() -> None:
    text = PAIRS.replace("g (", "g (float[2, 4, 6] base, ").replace("(float[4, 6] y)", "(float[2, 4, 6] y)")
    model = ir.from_onnx_text(text.replace("y = Add (r, s)", "t = Add (r, s)\n    y = Add (t, base)"))
    assert JoinPads()(model).modified
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert {node.outputs[0].name: node.outputs[0].shape for node in model.graph}["y_view"] == ir.Shape([4, 6])


def test_a_pad_with_a_complex_number_stays() -> None:
    text = f"""{HEADER}
g (complex64[2] x, complex64 zero) => (complex64[3] y) <int64[2] pads = {{0, 1}}> {{
    y = Pad (x, pads, zero)
}}
"""
    proto = onnx.parser.parse_model(text)
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.helper.make_tensor("zero", onnx.TensorProto.COMPLEX64, [], [0]))
    model = ir.from_proto(proto)
    assert not JoinPads(short_runs=True)(model).modified
