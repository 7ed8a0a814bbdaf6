"""Graph before, graph after."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from ort_dynamo.passes.onnx.merge_transposes import MergeTransposes
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'

TOKENS = (
    HEADER
    + """
g (float[N, 7, 5, 32] x) => (float[N, 35, 32] y) <int64[3] flat = {0, 32, 35}> {
    images = Transpose <perm: ints = [0, 3, 1, 2]> (x)
    rows = Reshape (images, flat)
    y = Transpose <perm: ints = [0, 2, 1]> (rows)
}
"""
)


def test_tokens_of_an_image_in_channels_last_are_a_reshape() -> None:
    assert_rewrites(
        MergeTransposes(),
        TOKENS,
        HEADER
        + """
g (float[N, 7, 5, 32] x) => (float[N, 35, 32] y)
  <int64[3] flat = {0, 32, 35}, int64[3] "shape_-1x35x32" = {-1, 35, 32}> {
    images = Transpose <perm: ints = [0, 3, 1, 2]> (x)
    rows = Reshape (images, flat)
    y = Reshape (x, "shape_-1x35x32")
}
""",
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("perm: ints = [0, 2, 1]", "perm: ints = [2, 0, 1]"),
        ("perm: ints = [0, 3, 1, 2]", "perm: ints = [0, 3, 2, 1]"),
        ("float[N, 7, 5, 32] x", "float[N, M, 5, 32] x"),
        ("y = Transpose", "z = Neg (rows)\n    y = Transpose"),
    ],
)
def test_other_orders_stay(old: str, new: str) -> None:
    text = TOKENS.replace(old, new)
    if "Neg" in new:
        text = text.replace("(rows)\n}", "(z)\n}")
    model = ir.from_onnx_text(text)
    assert not MergeTransposes()(model).modified


def evaluate(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return list(ReferenceEvaluator(proto).run(None, {"x": x}))


@pytest.mark.parametrize("seed", range(150))
def test_random_chains_keep_their_elements(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = [int(size) for size in random.choice([1, 2, 2, 3, 4, 6], random.integers(2, 5))]
    sizes, lines, constants, value = list(shape), [], [], "x"
    back: list[int] | None = None
    for index in range(int(random.integers(2, 6))):
        if random.random() < 0.5:
            perm = [int(axis) for axis in random.permutation(len(sizes))]
            if back is not None and len(back) == len(sizes) and random.random() < 0.6:
                perm = back
            back = [int(axis) for axis in np.argsort(perm)]
            lines.append(f"v{index} = Transpose <perm = [{', '.join(map(str, perm))}]> ({value})")
            sizes = [sizes[axis] for axis in perm]
        else:
            sizes = reshaped(random, sizes)
            constants.append(f"int64[{len(sizes)}] s{index} = {{{', '.join(map(str, sizes))}}}")
            lines.append(f"v{index} = Reshape ({value}, s{index})")
        value = f"v{index}"
    given, result = (", ".join(map(str, of)) for of in (shape, sizes))
    stated = f"<{', '.join(constants)}>" if constants else ""
    text = f"{HEADER}\ng (float[{given}] x) => (float[{result}] {value}) {stated} {{\n" + "\n".join(lines) + "\n}"
    model = ir.from_onnx_text(text)
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    (expected,) = evaluate(model, x)
    MergeTransposes()(model)
    (found,) = evaluate(model, x)
    np.testing.assert_array_equal(found, expected)
    assert not MergeTransposes()(model).modified  # a second run finds nothing


def reshaped(random: np.random.Generator, sizes: list[int]) -> list[int]:
    """A random shape of as many elements: neighbouring dimensions joined, or one split, or ones added."""
    sizes = list(sizes)
    place = int(random.integers(len(sizes)))
    kind = random.random()
    if kind < 0.4 and place + 1 < len(sizes):
        return [*sizes[:place], sizes[place] * sizes[place + 1], *sizes[place + 2 :]]
    divisors = [number for number in range(2, sizes[place]) if sizes[place] % number == 0]
    if kind < 0.8 and divisors:
        number = int(random.choice(divisors))
        return [*sizes[:place], number, sizes[place] // number, *sizes[place + 1 :]]
    return [*sizes[:place], 1, *sizes[place:]]


def test_many_random_chains_are_merged() -> None:
    model = ir.from_onnx_text(
        HEADER
        + """
g (float[2, 3, 4, 5] x) => (float[24, 5] y, float[2, 12, 5, 1] z)
<int64[4] flat = {2, 5, 12, 1}, int64[1] last = {3}> {
    a = Transpose <perm = [0, 3, 1, 2]> (x)
    b = Reshape (a, flat)
    c = Squeeze (b, last)
    d = Transpose <perm = [0, 2, 1]> (c)
    y = Flatten <axis = 2> (d)
    e = Unsqueeze (c, last)
    z = Transpose <perm = [0, 2, 1, 3]> (e)
}"""
    )
    assert MergeTransposes()(model).modified
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("Transpose") == 1  # the first, which nothing reads any more
