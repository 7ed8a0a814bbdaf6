"""Graph before, graph after."""

from __future__ import annotations

import pytest

from ort_dynamo.passes.onnx.fold_casts import FoldCasts
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'
NUMBERS = {"int8": 3, "int64": 7, "float": 1, "float16": 10, "bfloat16": 16, "double": 11, "uint8": 2, "bool": 9}


def two_casts(a: str, b: str, c: str) -> str:
    return (
        HEADER
        + f"""
g ({a}[4] x) => ({c}[4] y) {{
    narrow = Cast <to: int = {NUMBERS[b]}> (x)
    wide = Cast <to: int = {NUMBERS[c]}> (narrow)
    y = Neg (wide)
}}
"""
    )


@pytest.mark.parametrize(
    "types",
    [
        ("bool", "bfloat16", "float"),
        ("float16", "float", "double"),
        ("uint8", "bfloat16", "float"),
        ("int8", "int64", "float"),
    ],
)
def test_a_cast_that_loses_nothing_is_skipped(types: tuple[str, str, str]) -> None:
    a, b, c = types
    assert_rewrites(
        FoldCasts(),
        two_casts(*types),
        HEADER
        + f"""
g ({a}[4] x) => ({c}[4] y) {{
    narrow = Cast <to: int = {NUMBERS[b]}> (x)
    wide = Cast <to: int = {NUMBERS[c]}> (x)
    y = Neg (wide)
}}
""",
    )


@pytest.mark.parametrize(
    "types",
    [
        ("float", "bfloat16", "float"),
        ("float", "float16", "double"),
        ("int64", "float", "double"),
        ("float16", "bfloat16", "float"),
    ],
)
def test_a_cast_that_rounds_stays(types: tuple[str, str, str]) -> None:
    assert_rewrites(FoldCasts(), two_casts(*types), two_casts(*types))


@pytest.mark.parametrize(("a", "b"), [("float", "double"), ("bool", "int64"), ("int8", "float")])
def test_a_cast_to_strings_stays(a: str, b: str) -> None:
    text = (
        HEADER
        + f"""
g ({a}[4] x) => (string[4] y) {{
    wide = Cast <to: int = {NUMBERS[b]}> (x)
    text = Cast <to: int = 8> (wide)
    y = Identity (text)
}}
"""
    )
    assert_rewrites(FoldCasts(), text, text)


def test_there_and_back_again_is_nothing() -> None:
    assert_rewrites(
        FoldCasts(),
        two_casts("float16", "float", "float16"),
        HEADER
        + """
g (float16[4] x) => (float16[4] y) {
    narrow = Cast <to: int = 1> (x)
    y = Neg (x)
}
""",
    )


def test_an_output_keeps_its_cast_back() -> None:
    before = (
        HEADER
        + """
g (float16[4] x) => (float16[4] y) {
    wide = Cast <to: int = 1> (x)
    y = Cast <to: int = 10> (wide)
}
"""
    )
    assert_rewrites(FoldCasts(), before, before)


def test_casts_of_a_branch_are_folded_into_its_captured_value() -> None:
    def branches(source: str) -> str:
        return (
            HEADER
            + f"""
g (bool c, bool[4] x) => (float[4] y) {{
    narrow = Cast <to: int = 16> (x)
    y = If (c) <
        then_branch = t () => (float[4] a) {{ wide = Cast <to: int = 1> ({source})  a = Neg (wide) }},
        else_branch = e () => (float[4] b) {{ other = Cast <to: int = 1> ({source})  b = Abs (other) }}
    >
}}
"""
        )

    assert_rewrites(FoldCasts(), branches("narrow"), branches("x"))
