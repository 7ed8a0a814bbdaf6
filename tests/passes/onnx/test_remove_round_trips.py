"""Graph before, graph after."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ort_dynamo.graph.marks import FOR_KERNEL, FX_NODE, READS_ROUNDED
from ort_dynamo.passes.onnx.remove_round_trips import RemoveRoundTrips
from ort_dynamo.testing import assert_rewrites

HEADER = '<ir_version: 10, opset_import: ["" : 20]>\n'

KERNEL = {FOR_KERNEL: "1"}


def chain(middle: str = "", last: str = "rounded", type_: str = "bfloat16") -> str:
    """Two products, computed in float32 around values of a narrow type."""
    to = {"bfloat16": 16, "float16": 10}[type_]
    return (
        HEADER
        + f"""
g (float[4, 4] x, float[4, 4] w) => (float[4, 4] y, {type_}[4, 4] kept) <int64[2] shape = {{4, 4}}> {{
    exact = MatMul (x, w)
    rounded = Cast <to: int = {to}> (exact)
    kept = Neg (rounded)
    {middle}
    widened = Cast <to: int = 1> ({last})
    y = MatMul (widened, w)
}}
"""
    )


def without_round_trip(middle: str = "", last: str = "exact", type_: str = "bfloat16", before: str = "rounded") -> str:
    text = chain(type_=type_).split("    \n")[0]
    return (
        text
        + f"""
    {middle}
    widened = Cast <to: int = 1> ({before})
    y = MatMul ({last}, w)
}}
"""
    )


@pytest.mark.parametrize("made", [("rounded",), ("widened",), ("rounded", "widened")])
def test_a_rounding_for_lack_of_a_kernel_between_two_operators_goes(made: tuple[str, ...]) -> None:
    assert_rewrites(RemoveRoundTrips(), chain(), without_round_trip(), dict.fromkeys(made, KERNEL))


def test_a_round_trip_that_the_user_wrote_stays() -> None:
    assert_rewrites(RemoveRoundTrips(), chain(), chain())


def test_another_operator_that_makes_a_wider_type_is_no_cast() -> None:
    marks = {name: {**KERNEL, FX_NODE: "mm"} for name in ("rounded", "widened")}
    before = chain(type_="float16")
    assert_rewrites(RemoveRoundTrips(), before, without_round_trip(type_="float16"), marks)
    before = before.replace("Cast <to: int = 1>", "EyeLike <dtype: int = 1>")
    assert_rewrites(RemoveRoundTrips(), before, before, marks)


def test_a_consumer_that_asks_for_the_rounding_gets_it() -> None:
    marks = {"rounded": KERNEL, "widened": KERNEL, "y": {READS_ROUNDED: "1"}}
    assert_rewrites(RemoveRoundTrips(), chain(), chain(), marks)


def test_a_consumer_that_asks_for_the_rounding_gets_it_through_data_movement() -> None:
    moved = chain().replace("(widened, w)", "(turned, w)").replace("y =", "turned = Transpose (widened)\n    y =")
    marks = {"rounded": KERNEL, "widened": KERNEL, "y": {READS_ROUNDED: "1"}}
    assert_rewrites(RemoveRoundTrips(), moved, moved, marks)


def test_without_excess_precision_it_stays() -> None:
    marks = {"rounded": {**KERNEL, FX_NODE: "mm"}, "widened": {**KERNEL, FX_NODE: "mm_1"}}
    assert_rewrites(RemoveRoundTrips(excess_precision=False), chain(), chain(), marks)


@pytest.mark.parametrize("pass_", [RemoveRoundTrips(), RemoveRoundTrips(excess_precision=False)])
@pytest.mark.parametrize("type_", ["bfloat16", "float16"])
def test_within_one_node_it_goes_as_its_eager_kernel_rounds_once(pass_: RemoveRoundTrips, type_: str) -> None:
    marks = {name: {**KERNEL, FX_NODE: "gelu"} for name in ("rounded", "widened")}
    assert_rewrites(pass_, chain(type_=type_), without_round_trip(type_=type_), marks)


def test_a_float16_rounding_between_nodes_stays_because_it_may_overflow() -> None:
    marks = {"rounded": {**KERNEL, FX_NODE: "mm"}, "widened": {**KERNEL, FX_NODE: "mm_1"}}
    assert_rewrites(RemoveRoundTrips(), chain(type_="float16"), chain(type_="float16"), marks)


MOVED = "moved = Transpose <perm: ints = [1, 0]> (rounded)"


@pytest.mark.parametrize(
    ("moved", "again"),
    [
        (MOVED, "moved_unrounded = Transpose <perm: ints = [1, 0]> (exact)"),
        ("moved = Reshape (rounded, shape)", "moved_unrounded = Reshape (exact, shape)"),
        ("moved = Expand (rounded, shape)", "moved_unrounded = Expand (exact, shape)"),
    ],
)
def test_movements_of_data_between_the_casts_are_made_in_the_wide_type(moved: str, again: str) -> None:
    assert_rewrites(
        RemoveRoundTrips(),
        chain(moved, "moved"),
        without_round_trip(f"{moved}  {again}", "moved_unrounded", before="moved"),
        {"rounded": KERNEL},
    )


def test_a_movement_that_somebody_else_reads_is_not_made_twice() -> None:
    middle = MOVED + "  other = Abs (moved)"
    assert_rewrites(RemoveRoundTrips(), chain(middle, "moved"), chain(middle, "moved"), {"rounded": KERNEL})


def test_a_concatenation_needs_all_its_parts_unrounded() -> None:
    def joined(second: str) -> str:
        middle = f"half = Slice (rounded, zero, two, zero)  other = Slice ({second}, zero, two, zero)"
        text = chain(middle + "  moved = Concat <axis: int = 0> (half, other)", "moved")
        return text.replace("int64[2] shape", "int64[1] zero = {0}, int64[1] two = {2}, int64[2] shape")

    before = joined("rounded")
    after = before.replace(
        "widened = ",
        """half_unrounded = Slice (exact, zero, two, zero)
    other_unrounded = Slice (exact, zero, two, zero)
    moved_unrounded = Concat <axis: int = 0> (half_unrounded, other_unrounded)
    widened = """,
    ).replace("MatMul (widened", "MatMul (moved_unrounded")
    assert_rewrites(RemoveRoundTrips(), before, after, {"rounded": KERNEL})
    assert_rewrites(RemoveRoundTrips(), joined("kept"), joined("kept"), {"rounded": KERNEL})


@pytest.mark.parametrize(("check", "operand"), [("IsNaN (widened)", "exact"), ("Equal (widened, z)", "widened")])
def test_the_neighbour_of_a_comparison_reads_its_value(check: str, operand: str) -> None:
    def text(operand: str) -> str:
        return (
            HEADER
            + f"""
g (float[4] x, float[4] z) => (bool[4] checked, float[4] y) {{
    exact = Exp (x)
    rounded = Cast <to: int = 16> (exact)
    widened = Cast <to: int = 1> (rounded)
    checked = {check}
    y = Neg ({operand})
}}
"""
        )

    assert_rewrites(RemoveRoundTrips(), text("widened"), text(operand), {"rounded": KERNEL})


def test_an_output_gets_the_exact_value() -> None:
    def text(output: str) -> str:
        return (
            HEADER
            + f"""
g (float[4] x) => (float[4] {output}) {{
    exact = Exp (x)
    rounded = Cast <to: int = 16> (exact)
    widened = Cast <to: int = 1> (rounded)
}}
"""
        )

    assert_rewrites(RemoveRoundTrips(), text("widened"), text("exact"), {"rounded": KERNEL})


def test_a_lossless_round_trip_is_not_its_business() -> None:
    before = (
        HEADER
        + """
g (bfloat16[4] x) => (bfloat16[4] y) {
    wide = Cast <to: int = 1> (x)
    narrow = Cast <to: int = 16> (wide)
    y = Neg (narrow)
}
"""
    )
    marks: Mapping[str, Mapping[str, str]] = {"wide": KERNEL, "narrow": KERNEL}
    assert_rewrites(RemoveRoundTrips(), before, before, marks)


def test_the_result_of_a_branch_stays_a_value_of_the_branch() -> None:
    def text(then: str, output: str) -> str:
        return (
            HEADER
            + f"""
g (float[4] x, bool c) => (float[4] y) {{
    exact = Exp (x)
    rounded = Cast <to: int = 16> (exact)
    y = If (c) <
        then_branch = t () => (float[4] {output}) {{ {then} }},
        else_branch = e () => (float[4] q) {{ q = Neg (x) }}
    >
}}
"""
        )

    cast = "p = Cast <to: int = 1> (rounded)"
    after = text(f"p_unrounded = Identity (exact)  {cast}", "p_unrounded")
    assert_rewrites(RemoveRoundTrips(), text(cast, "p"), after, {"rounded": KERNEL})


def test_a_movement_repeated_outside_and_in_a_branch_has_two_names() -> None:
    """ONNX forbids a value of a branch whose name hides one of the graph around it."""

    def text(outside: str, read_outside: str, inside: str, read_inside: str) -> str:
        return (
            HEADER
            + f"""
g (float[4, 1] x, bool c) => (float[1, 4] z, float[1, 4] y) {{
    exact = Exp (x)
    rounded = Cast <to: int = 16> (exact)
    moved = Reshape <allowzero: int = 0> (rounded, shape)
    {outside}
    widened = Cast <to: int = 1> (moved)
    z = Neg ({read_outside})
    y = If (c) <
        then_branch = t () => (float[1, 4] p) {{ {inside} cast = Cast <to: int = 1> (moved)  p = Neg ({read_inside}) }},
        else_branch = e () => (float[1, 4] q) {{ q = Exp (z) }}
    >
}}
"""
        ).replace("x, bool c)", "x, bool c, int64[2] shape)")

    move = "= Reshape <allowzero: int = 0> (exact, shape)"
    after = text(f"moved_unrounded {move}", "moved_unrounded", f"moved_unrounded_2 {move}", "moved_unrounded_2")
    marks: Mapping[str, Mapping[str, str]] = {"rounded": KERNEL}
    assert_rewrites(RemoveRoundTrips(), text("", "widened", "", "cast"), after, marks)


def decided(body: str, operand: str, outputs: str = "bool[4] equal") -> str:
    """A body that reads the rounded value as `widened`, and an operand of its own."""
    return (
        HEADER
        + f"""
g (float[4] x, float[4] z, bool c) => ({outputs}) <int64[1] axis = {{0}}, float infinite = {{inf}}> {{
    exact = Exp (x)
    rounded = Cast <to: int = 16> (exact)
    widened = Cast <to: int = 1> (rounded)
    {body.format(operand)}
}}
"""
    )


@pytest.mark.parametrize(
    "body",
    [
        "largest = ReduceMax (widened, axis)  equal = Equal (largest, widened)",
        "size = Abs (widened)  whole = Floor (size)  equal = Less (whole, z)",
        "whole = Cast <to: int = 7> (widened)  equal = Equal (whole, whole)",
        "sum = Add (widened, z)  whole = Cast <to: int = 7> (sum)  equal = Equal (whole, whole)",
        "y = If (c) <"
        " then_branch = t () => (float[4] p) { p = Neg (widened) },"
        " else_branch = e () => (float[4] q) { q = Neg (x) }"
        ">  equal = Equal (y, z)",
        "equal = If (c) <"
        " then_branch = t () => (bool[4] p) { n = Neg (widened)  p = Equal (n, z) },"
        " else_branch = e () => (bool[4] q) { q = Equal (x, z) }"
        ">",
    ],
)
def test_all_that_leads_to_a_comparison_gets_the_rounded_value(body: str) -> None:
    text = decided(body.replace("{", "{{").replace("}", "}}"), "widened")
    assert_rewrites(RemoveRoundTrips(), text, text, {"rounded": KERNEL})


@pytest.mark.parametrize(
    "rest",
    [
        "narrow = Cast <to: int = 16> (y)  wide = Cast <to: int = 1> (narrow)  equal = Equal (wide, z)",
        "equal = IsNaN (y)",
        "equal = Equal (y, infinite)",
        "sizes = Shape (y)  moved = Reshape (z, sizes)  equal = Equal (moved, z)",
    ],
)
def test_before_a_rounding_or_a_range_check_the_exact_value_does(rest: str) -> None:
    body = "y = Neg ({})  " + rest
    assert_rewrites(RemoveRoundTrips(), decided(body, "widened"), decided(body, "exact"), {"rounded": KERNEL})


def test_an_output_beside_a_comparison_is_rounded() -> None:
    text = decided("equal = Equal (widened, z)", "", "float[4] widened, bool[4] equal")
    assert_rewrites(RemoveRoundTrips(), text, text, {"rounded": KERNEL})
