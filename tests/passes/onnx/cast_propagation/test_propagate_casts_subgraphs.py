"""Graph before, graph after, for casts in branches and the bodies of loops."""

from __future__ import annotations

from cast_graphs import INSERT, NONE, check

BRANCH = """g (float16[2, 3] x, bool p) => (float[3, 2] y) {{ {}
    y = If (p) <then_branch = t () => (float[3, 2] yt) {{ {} }},
                else_branch = e () => (float[3, 2] ye) {{ {} }}> }}"""


def test_a_branch_reads_the_value_that_was_widened_outside() -> None:
    check(
        BRANCH.format(
            "a = => f32(x)",
            "b = => f16(a) c = Exp (b) d = Transpose (c) yt = => f32(d)",
            "f = Transpose (a) ye = Exp (f)",
        ),
        BRANCH.format(
            "",
            "c = Exp (x) d = Transpose (c) yt = => f32(d)",
            "f = Transpose (x) f_float32 = => f32(f) ye = Exp (f_float32)",
        ),
    )


def test_a_branch_that_only_takes_a_widening_back_returns_an_identity() -> None:
    text = """g (float16[2] x, bool p) => (float16[2] y) {{ {}
        y = If (p) <then_branch = t () => (float16[2] yt) {{ yt = {} }},
                    else_branch = e () => (float16[2] ye) {{ ye = Exp (x) }}> }}"""
    check(text.format("a = => f32(x)", "=> f16(a)"), text.format("", "Identity (x)"), strategy=NONE)
    check(
        text.format("h = Exp (x) a = => f32(h)", "=> f16(a)"), text.format("h = Exp (x)", "Identity (h)"), strategy=NONE
    )


def test_new_names_do_not_hide_names_in_branches() -> None:
    check(
        BRANCH.format(
            "a = => f32(x) b = Neg (a)", "b_float32 = Exp (b) yt = Transpose (b_float32)", "ye = Transpose (b)"
        ),
        BRANCH.format(
            "b = Neg (x) b_float32_2 = => f32(b)",
            "b_float32 = Exp (b_float32_2) yt = Transpose (b_float32)",
            "ye = Transpose (b_float32_2)",
        ),
    )


def test_a_rounding_inside_of_a_branch_does_not_serve_outside() -> None:
    text = """g (float16[2, 3] x, float[2, 3] v, bool p) => (float16[2, 3] z, float[2, 3] y) {{ {}
        y = If (p) <then_branch = t () => (float[2, 3] yt) {{ c = => f16(v) f = Exp (c) yt = => f32(f) }},
                    else_branch = e () => (float[2, 3] ye) {{ ye = Exp (v) }}> }}"""
    check(
        text.format("a = => f32(x) d = Add (a, v) e = => f16(d) z = Exp (e)"),
        text.format("v_float16 = => f16(v) d = Add (x, v_float16) z = Exp (d)"),
        level=2,
    )


def test_a_value_that_a_branch_reads_in_float32_is_widened_for_it() -> None:
    check(
        BRANCH.format("a = => f32(x) b = Neg (a)", "c = Exp (b) yt = Transpose (c)", "ye = Transpose (b)"),
        BRANCH.format(
            "b = Neg (x) b_float32 = => f32(b)",
            "c = Exp (b_float32) yt = Transpose (c)",
            "ye = Transpose (b_float32)",
        ),
    )


def test_the_body_of_a_loop_keeps_its_signature() -> None:
    text = """g (float16[2, 2] x, int64 n, bool p) => (float16[2, 2] y) {
        y = Loop (n, p, x) <body = b (int64 i, bool q, float16[2, 2] s) => (bool r, float16[2, 2] t) { %s }> }"""
    check(
        text % "r = Identity (q) a = => f32(s) c = Transpose (a) t = => f16(c)",
        text % "r = Identity (q) t = Transpose (s)",
    )


def test_the_body_of_a_scan_keeps_its_signature_and_reads_a_narrow_outer_value() -> None:
    before = """g (float16[2] x, float[2] s, float[3, 2] z) => (float[2] y, float16[3, 2] r) {
        a = => f32(x)
        y, r = Scan <num_scan_inputs = 1, body = b (float[2] t, float[2] i) => (float[2] u, float16[2] o) {
            u = Add (t, i) c = => f16(a) d = Neg (c) e = => f32(d) f = Abs (e) o = => f16(f) }> (s, z) }"""
    after = """g (float16[2] x, float[2] s, float[3, 2] z) => (float[2] y, float16[3, 2] r) {
        y, r = Scan <num_scan_inputs = 1, body = b (float[2] t, float[2] i) => (float[2] u, float16[2] o) {
            u = Add (t, i) d = Neg (x) o = Abs (d) }> (s, z) }"""
    check(before, after)


def test_a_rounding_in_a_branch_goes_where_its_value_becomes_narrow_outside() -> None:
    check(
        BRANCH.format(
            "b = Exp (x) a = => f32(b) d = Neg (a)",
            "c = => f16(d) f = Exp (c) h = => f32(f) yt = Transpose (h)",
            "i = => f16(d) j = Sqrt (i) k = => f32(j) ye = Transpose (k)",
        ),
        BRANCH.format(
            "b = Exp (x) d = Neg (b)",
            "f = Exp (d) yt_float16 = Transpose (f) yt = => f32(yt_float16)",
            "j = Sqrt (d) ye_float16 = Transpose (j) ye = => f32(ye_float16)",
        ),
    )


def test_casts_in_branches_count() -> None:
    # Level 2: a rounding of v and a widening of d would replace the widening of x and a rounding in each branch.
    text = """g (float16[2, 3] x, float[2, 3] v, bool p) => (float[2, 3] y, float[2, 3] z) {{ {}
        y = If (p) <then_branch = t () => (float[2, 3] yt) {{ {} yt = => f32(f) }},
                    else_branch = e () => (float[2, 3] ye) {{ {} ye = => f32(j) }}> }}"""
    check(
        text.format(
            "a = => f32(x) d = Add (a, v) z = Exp (d)", "c = => f16(d) f = Exp (c)", "i = => f16(d) j = Sqrt (i)"
        ),
        text.format(
            "v_float16 = => f16(v) d = Add (x, v_float16) d_float32 = => f32(d) z = Exp (d_float32)",
            "f = Exp (d)",
            "j = Sqrt (d)",
        ),
        level=2,
    )


def test_casts_that_nothing_reads_go_and_move_nothing() -> None:
    check(
        "g (float[2] x) => (float[2] y) { a = Neg (x) b = => f16(a) c = => f32(b) d = => f16(a) y = Exp (a) }",
        "g (float[2] x) => (float[2] y) { a = Neg (x) y = Exp (a) }",
        strategy=INSERT,
    )
