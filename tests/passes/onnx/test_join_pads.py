"""Graph before, graph after."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from ort_dynamo.passes.onnx import join_pads
from ort_dynamo.passes.onnx.join_pads import JoinPads
from ort_dynamo.testing import assert_close, assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'
PADS = "int64[4] left = {0, 0, 0, 3}, int64[4] right = {0, 2, 0, 0}"
ZERO = "float zero_float = {0}"

BOTH = (
    HEADER
    + f"""
g (float[4, 2] a, float[4, 3] b) => (float[4, 5] y) <{PADS}> {{
    p = Pad (a, left)
    q = Pad (b, right)
    y = Add (p, q)
}}
"""
)


def test_two_tensors_that_fill_an_axis_become_one() -> None:
    assert_rewrites(
        JoinPads(),
        BOTH,
        HEADER
        + f"""
g (float[4, 2] a, float[4, 3] b) => (float[4, 5] y) <{PADS}, {ZERO}> {{
    y_pieces = Concat <axis: int = 1> (a, b)
    y = Add (y_pieces, zero_float)
}}
""",
    )


def test_integers_have_no_negative_zero() -> None:
    before = BOTH.replace("float[", "int32[")
    assert_rewrites(
        JoinPads(),
        before,
        HEADER
        + f"""
g (int32[4, 2] a, int32[4, 3] b) => (int32[4, 5] y) <{PADS}> {{
    y = Concat <axis: int = 1> (a, b)
}}
""",
    )


def test_pieces_along_a_leading_axis_stand_in_order_and_other_sizes_may_be_symbolic() -> None:
    pads = "int64[4] first = {0, 0, 2, 0}, int64[4] second = {1, 0, 1, 0}, int64[4] third = {2, 0, 0, 0}"
    assert_rewrites(
        JoinPads(),
        HEADER
        + f"""
g (float[1, n] a, float[1, n] b, float[1, n] c) => (float[3, n] y) <{pads}> {{
    p = Pad (a, first)
    q = Pad (b, second)
    r = Pad (c, third)
    s = Add (r, p)
    y = Add (q, s)
}}
""",
        HEADER
        + f"""
g (float[1, n] a, float[1, n] b, float[1, n] c) => (float[3, n] y) <{pads}, {ZERO}> {{
    y_pieces = Concat <axis: int = 0> (a, b, c)
    y = Add (y_pieces, zero_float)
}}
""",
    )


@pytest.mark.parametrize("sums", ["s = Add (x, p)  y = Add (s, q)", "s = Add (q, x)  y = Add (p, s)"])
def test_one_other_term_is_added_to_the_pieces(sums: str) -> None:
    first, second = sums.split("  ")
    assert_rewrites(
        JoinPads(),
        HEADER
        + f"""
g (float[4, 2] a, float[4, 3] b, float[5] x) => (float[4, 5] y) <{PADS}> {{
    p = Pad (a, left)
    q = Pad (b, right)
    {first}
    {second}
}}
""",
        HEADER
        + f"""
g (float[4, 2] a, float[4, 3] b, float[5] x) => (float[4, 5] y) <{PADS}, {ZERO}> {{
    y_pieces = Concat <axis: int = 1> (a, b)
    y_sum = Add (x, y_pieces)
    y = Add (y_sum, zero_float)
}}
""",
    )


def test_terms_before_and_after_the_pieces_stay_in_order() -> None:
    assert_rewrites(
        JoinPads(),
        HEADER
        + f"""
g (float[4, 2] a, float[4, 3] b, float[4, 5] x, float[4, 5] z) => (float[4, 5] y) <{PADS}> {{
    p = Pad (a, left)
    q = Pad (b, right)
    s = Add (x, p)
    t = Add (s, q)
    y = Add (t, z)
}}
""",
        HEADER
        + f"""
g (float[4, 2] a, float[4, 3] b, float[4, 5] x, float[4, 5] z) => (float[4, 5] y) <{PADS}, {ZERO}> {{
    t_pieces = Concat <axis: int = 1> (a, b)
    t_sum = Add (x, t_pieces)
    t = Add (t_sum, zero_float)
    y = Add (t, z)
}}
""",
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("right = {0, 2, 0, 0}", "right = {0, 1, 0, 1}"),  # they have a common column, and leave one out
        ("y = Add (p, q)", "t = Add (p, x)\n    u = Add (t, z)\n    y = Add (u, q)"),  # z is added between them
        ("left = {0, 0, 0, 3}", "left = {0, 0, 0, 3}, float one = {1}"),  # see below: the fill is 1
        ("float[4, 5] y)", "float[4, 5] y, float[4, 5] p)"),  # the program reads a padded tensor
        ("Pad (a, left)", 'Pad <mode: string = "wrap"> (a, left)'),
        ("float[4, 2] a", "float[4, n] a"),
    ],
)
def test_other_sums_stay(old: str, new: str) -> None:
    text = BOTH.replace("float[4, 3] b)", "float[4, 3] b, float[4, 5] x, float[4, 5] z)").replace(old, new)
    if "one = {1}" in new:
        text = text.replace("Pad (b, right)", "Pad (b, right, one)")
    assert_rewrites(JoinPads(), text, text)


def test_pads_that_are_an_input_may_change() -> None:
    text = BOTH.replace("float[4, 3] b)", "float[4, 3] b, int64[4] left)").replace("int64[4] left = {0, 0, 0, 3}, ", "")
    model = ir.from_onnx_text(text)
    assert not JoinPads()(model).modified


def test_old_opsets_stay() -> None:
    model = ir.from_onnx_text(BOTH)
    model.opset_imports[""] = 10
    assert not JoinPads()(model).modified


def test_a_sum_that_is_left_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="ort_dynamo.passes"):
        JoinPads()(ir.from_onnx_text(BOTH.replace("{0, 2, 0, 0}", "{0, 1, 0, 1}")))
    assert "its padded terms do not fill one axis" in caplog.text


OWN = HEADER.replace('["" : 20]', '["" : 20, "own" : 1]')
"""The start of a model with operators whose results have no known type."""


def test_a_sum_of_an_unknown_type_stays() -> None:
    text = (
        OWN
        + f"""
g (float[4, 2] a, float[4, 3] b, float[4, 5] x) => (float[4, 5] y) <{PADS}> {{
    u = own.Unknown (x)
    p = Pad (a, left)
    q = Pad (b, right)
    s = Add (u, p)
    t = Add (s, q)
    y = Neg (t)
}}
"""
    )
    assert not JoinPads()(ir.from_onnx_text(text)).modified


def test_types_are_inferred_once_beside_an_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    monkeypatch.setattr(join_pads, "infer_missing_types", lambda model, shapes: models.append(model))
    text = (
        OWN
        + f"""
g (float[4, 2] a, float[4, 3] b, float[4, 5] x) => (float[4, 5] y, float[4, 5] z, float[4, 5] w) <{PADS}> {{
    u = own.Unknown (x)
    w = Neg (u)
    p = Pad (a, left)
    q = Pad (b, right)
    y = Add (p, q)
    r = Pad (a, left)
    s = Pad (b, right)
    z = Add (r, s)
}}
"""
    )
    model = ir.from_onnx_text(text)
    assert JoinPads()(model).modified
    assert models == [model]
    assert [node.op_type for node in model.graph] == ["Unknown", "Neg", "Concat", "Add", "Concat", "Add"]


def test_a_long_chain_of_sums_takes_no_recursion() -> None:
    terms = "\n".join(f"    s{index + 1} = Add (s{index}, x)" for index in range(3000))
    text = f"{HEADER}\ng (float[2] s0, float[2] x) => (float[2] s3000) {{\n{terms}\n}}"
    assert not JoinPads()(ir.from_onnx_text(text)).modified


@pytest.mark.parametrize("columns", [400, 401])
def test_a_long_chain_of_pads_is_joined_or_left(columns: int) -> None:
    pads = ", ".join(f"int64[4] a{index} = {{0, {index}, 0, {columns - 1 - index}}}" for index in range(400))
    lines = [f"p{index} = Pad (x, a{index})" for index in range(400)]
    lines += ["s1 = Add (p0, p1)"] + [f"s{index} = Add (s{index - 1}, p{index})" for index in range(2, 400)]
    body = "\n".join(lines)
    model = ir.from_onnx_text(f"{HEADER}\ng (float[2, 1] x) => (float[2, {columns}] s399) <{pads}> {{\n{body}\n}}")
    assert JoinPads()(model).modified == (columns == 400)
    assert [node.op_type for node in model.graph][:2] == (["Concat", "Add"] if columns == 400 else ["Pad", "Pad"])


SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize("seed", range(40))
def test_random_sums_keep_every_bit_and_sign(seed: int) -> None:
    random = np.random.default_rng(seed)
    axis, pieces, based = int(random.integers(2)), int(random.integers(2, 5)), bool(random.integers(2))
    widths = [int(width) for width in random.integers(1, 4, pieces)]
    total, shapes, lines, constants = sum(widths), [], [], []
    for index, width in enumerate(widths):
        before, after = sum(widths[:index]), sum(widths[index + 1 :])
        pads = [0, before, 0, after] if axis else [before, 0, after, 0]
        constants.append(f"int64[4] pads{index} = {{{', '.join(map(str, pads))}}}")
        shapes.append((5, width) if axis else (width, 5))
        lines.append(f"p{index} = Pad (x{index}, pads{index})")
    whole = (5, total) if axis else (total, 5)
    terms = [f"p{index}" for index in range(pieces)] + (["base"] if based else [])
    result = added(terms, lines, random)
    names = [f"x{index}" for index in range(pieces)] + (["base"] if based else [])
    sizes = [*shapes, *([whole] if based else [])]
    inputs = ", ".join(f"float[{a}, {b}] {name}" for name, (a, b) in zip(names, sizes, strict=True))
    text = f"{HEADER}\ng ({inputs}) => (float[{whole[0]}, {whole[1]}] {result}) <{', '.join(constants)}> {{\n"
    model = ir.from_onnx_text(text + "\n".join(lines) + "\n}")
    given = {name: random.choice(SPECIAL, size) for name, size in zip(names, sizes, strict=True)}
    assert assert_keeps_bits(JoinPads(), model, given)
    assert "Pad" not in {node.op_type for node in model.graph}


def added(terms: list[str], lines: list[str], random: np.random.Generator) -> str:
    """Add nodes to `lines` that add up all terms as a random tree; gives the sum's name."""
    while len(terms) > 1:
        first, second = (terms.pop(int(random.integers(len(terms)))) for _ in range(2))
        lines.append(f"t{len(lines)} = Add ({first}, {second})")
        terms.append(f"t{len(lines) - 1}")
    return terms[0]


def assert_keeps_bits(joins: JoinPads, model: ir.Model, given: dict[str, np.ndarray]) -> bool:
    """Run the pass; the result stays the same, signs of zeros included. Gives whether the model changed."""
    expected = evaluate(ir.to_proto(model), given)
    modified = joins(model).modified
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    found = evaluate(proto, given)
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers])
    return modified


def evaluate(model: onnx.ModelProto, given: dict[str, np.ndarray]) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # infinity less infinity
        (result,) = ReferenceEvaluator(model).run(None, given)
    return result


def halves(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([-x[..., 4:], x[..., :4]], -1)


def thirds(x: torch.Tensor) -> torch.Tensor:
    return x[..., :3] * x[..., 3:6] + x[..., 6:].sum()


def entries(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0] * x[:, 1] - x[:, 2].sigmoid()


def pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def every_third(x: torch.Tensor) -> torch.Tensor:
    return x[:, ::3] * x[:, 2::3] - x[:, 1::3].sigmoid()


def second_of_three(x: torch.Tensor) -> torch.Tensor:
    return x[:, 1::3] * 2


CUT = [(halves, 8), (thirds, 8), (thirds, 9), (entries, 3), (pairs, 8), (every_third, 9), (second_of_three, 10)]


@pytest.mark.parametrize(("function", "width"), CUT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_slices_equal_eager(function, width: int, dtype: torch.dtype, dynamic: bool) -> None:
    x = torch.randn(5, width, dtype=dtype)
    x[0], x[1] = 0.0, -0.0
    tangent = torch.randn_like(function(x))
    tangent[0] = -0.0

    def step(run) -> torch.Tensor:
        given = x.clone().requires_grad_()
        (run(given) + given.sum() * 0).backward(tangent)
        assert given.grad is not None
        return given.grad

    options = {"placement": "onnxruntime"}
    expected, found = (
        step(function),
        step(torch.compile(function, backend="ort_train", dynamic=dynamic, options=options)),
    )
    assert_close(found, expected, "gradient")
    assert torch.equal(torch.signbit(found), torch.signbit(expected))
