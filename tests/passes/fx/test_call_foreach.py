"""Tests of joining casts and counters into one foreach call, and of its position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx import call_foreach
from ort_dynamo.passes.fx.call_foreach import CallForeach, cast_all
from ort_dynamo.passes.fx.torch_graph.place_foreach import PlaceForeach
from ort_dynamo.passes.fx.torch_graph.whole_kernels import FOREACH


def placed(function: Callable[..., Any], *inputs: Any) -> GraphModule:
    """Trace a function, and mark the operators to group into foreach calls."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    run_twice(PlaceForeach(), gm)
    return gm


MARK = f"chosen={FOREACH!r}"
WEIGHTS = [torch.randn(size, size + 1) for size in (3, 4, 5, 6)]


def products(*weights: Tensor) -> list[Tensor]:
    return [one @ one.t() for one in (weight.bfloat16() for weight in weights)]


def test_casts_of_weights_are_one_call_before_the_first_product() -> None:
    gm = placed(products, *WEIGHTS)
    assert_fx_rewrites(
        CallForeach(),
        f"""
        arg0_1: f32[3, 4]
        arg1_1: f32[4, 5]
        arg2_1: f32[5, 6]
        arg3_1: f32[6, 7]
        _to_copy = aten._to_copy.default(arg0_1, dtype=bf16)  # bf16[3, 4] | {MARK}
        t = aten.t.default(_to_copy)  # bf16[4, 3] strides (1, 4)
        mm = aten.mm.default(_to_copy, t)  # bf16[3, 3]
        _to_copy_1 = aten._to_copy.default(arg1_1, dtype=bf16)  # bf16[4, 5] | {MARK}
        t_1 = aten.t.default(_to_copy_1)  # bf16[5, 4] strides (1, 5)
        mm_1 = aten.mm.default(_to_copy_1, t_1)  # bf16[4, 4]
        _to_copy_2 = aten._to_copy.default(arg2_1, dtype=bf16)  # bf16[5, 6] | {MARK}
        t_2 = aten.t.default(_to_copy_2)  # bf16[6, 5] strides (1, 6)
        mm_2 = aten.mm.default(_to_copy_2, t_2)  # bf16[5, 5]
        _to_copy_3 = aten._to_copy.default(arg3_1, dtype=bf16)  # bf16[6, 7] | {MARK}
        t_3 = aten.t.default(_to_copy_3)  # bf16[7, 6] strides (1, 7)
        mm_3 = aten.mm.default(_to_copy_3, t_3)  # bf16[6, 6]
        return [mm, mm_1, mm_2, mm_3]
        """,
        f"""
        arg0_1: f32[3, 4]
        arg1_1: f32[4, 5]
        arg2_1: f32[5, 6]
        arg3_1: f32[6, 7]
        cast_all = cast_all([arg0_1, arg1_1, arg2_1, arg3_1], bf16)  # {MARK}
        getitem = cast_all[0]  # bf16[3, 4] | {MARK}
        getitem_1 = cast_all[1]  # bf16[4, 5] | {MARK}
        getitem_2 = cast_all[2]  # bf16[5, 6] | {MARK}
        getitem_3 = cast_all[3]  # bf16[6, 7] | {MARK}
        t = aten.t.default(getitem)  # bf16[4, 3] strides (1, 4)
        mm = aten.mm.default(getitem, t)  # bf16[3, 3]
        t_1 = aten.t.default(getitem_1)  # bf16[5, 4] strides (1, 5)
        mm_1 = aten.mm.default(getitem_1, t_1)  # bf16[4, 4]
        t_2 = aten.t.default(getitem_2)  # bf16[6, 5] strides (1, 6)
        mm_2 = aten.mm.default(getitem_2, t_2)  # bf16[5, 5]
        t_3 = aten.t.default(getitem_3)  # bf16[7, 6] strides (1, 7)
        mm_3 = aten.mm.default(getitem_3, t_3)  # bf16[6, 6]
        return [mm, mm_1, mm_2, mm_3]
        """,
        gm,
    )


def test_few_casts_stay() -> None:
    assert_fx_untouched(CallForeach(), placed(products, *WEIGHTS[:3]))


def test_a_cast_that_a_kernel_reads_is_part_of_it() -> None:
    gm = make_fx(lambda *w: [one.bfloat16() * 2 for one in w], tracing_mode="fake")(*WEIGHTS)
    assert_fx_untouched(PlaceForeach(), gm)
    assert_fx_untouched(CallForeach(), gm)


def test_numbers_that_vmap_casts_are_no_weights() -> None:
    scaled = torch.vmap(torch.vmap(lambda row: row * 2))
    gm = make_fx(lambda *w: [scaled(one) for one in w], tracing_mode="fake")(*WEIGHTS)
    assert_fx_untouched(PlaceForeach(), gm)


def test_casts_of_gradients_are_one_call_after_the_last_product() -> None:
    halves = [one.bfloat16() for one in WEIGHTS]
    gm = placed(lambda *w: [(one @ one.t()).float() for one in w], *halves)
    assert_fx_rewrites(
        CallForeach(),
        f"""
        arg0_1: bf16[3, 4]
        arg1_1: bf16[4, 5]
        arg2_1: bf16[5, 6]
        arg3_1: bf16[6, 7]
        t = aten.t.default(arg0_1)  # bf16[4, 3] strides (1, 4)
        mm = aten.mm.default(arg0_1, t)  # bf16[3, 3]
        _to_copy = aten._to_copy.default(mm, dtype=f32)  # f32[3, 3] | {MARK}
        t_1 = aten.t.default(arg1_1)  # bf16[5, 4] strides (1, 5)
        mm_1 = aten.mm.default(arg1_1, t_1)  # bf16[4, 4]
        _to_copy_1 = aten._to_copy.default(mm_1, dtype=f32)  # f32[4, 4] | {MARK}
        t_2 = aten.t.default(arg2_1)  # bf16[6, 5] strides (1, 6)
        mm_2 = aten.mm.default(arg2_1, t_2)  # bf16[5, 5]
        _to_copy_2 = aten._to_copy.default(mm_2, dtype=f32)  # f32[5, 5] | {MARK}
        t_3 = aten.t.default(arg3_1)  # bf16[7, 6] strides (1, 7)
        mm_3 = aten.mm.default(arg3_1, t_3)  # bf16[6, 6]
        _to_copy_3 = aten._to_copy.default(mm_3, dtype=f32)  # f32[6, 6] | {MARK}
        return [_to_copy, _to_copy_1, _to_copy_2, _to_copy_3]
        """,
        f"""
        arg0_1: bf16[3, 4]
        arg1_1: bf16[4, 5]
        arg2_1: bf16[5, 6]
        arg3_1: bf16[6, 7]
        t = aten.t.default(arg0_1)  # bf16[4, 3] strides (1, 4)
        mm = aten.mm.default(arg0_1, t)  # bf16[3, 3]
        t_1 = aten.t.default(arg1_1)  # bf16[5, 4] strides (1, 5)
        mm_1 = aten.mm.default(arg1_1, t_1)  # bf16[4, 4]
        t_2 = aten.t.default(arg2_1)  # bf16[6, 5] strides (1, 6)
        mm_2 = aten.mm.default(arg2_1, t_2)  # bf16[5, 5]
        t_3 = aten.t.default(arg3_1)  # bf16[7, 6] strides (1, 7)
        mm_3 = aten.mm.default(arg3_1, t_3)  # bf16[6, 6]
        cast_all = cast_all([mm, mm_1, mm_2, mm_3], f32)  # {MARK}
        getitem = cast_all[0]  # f32[3, 3] | {MARK}
        getitem_1 = cast_all[1]  # f32[4, 4] | {MARK}
        getitem_2 = cast_all[2]  # f32[5, 5] | {MARK}
        getitem_3 = cast_all[3]  # f32[6, 6] | {MARK}
        return [getitem, getitem_1, getitem_2, getitem_3]
        """,
        gm,
    )


def test_a_call_has_a_bounded_size(monkeypatch: Any) -> None:
    monkeypatch.setattr(call_foreach, "_MOST_BYTES", 2 * (3 * 4 + 4 * 5))
    gm = placed(products, *WEIGHTS)  # two that fit together, and two that are too large for any company
    assert_fx_rewrites(
        CallForeach(),
        f"""
        arg0_1: f32[3, 4]
        arg1_1: f32[4, 5]
        arg2_1: f32[5, 6]
        arg3_1: f32[6, 7]
        _to_copy = aten._to_copy.default(arg0_1, dtype=bf16)  # bf16[3, 4] | {MARK}
        t = aten.t.default(_to_copy)  # bf16[4, 3] strides (1, 4)
        mm = aten.mm.default(_to_copy, t)  # bf16[3, 3]
        _to_copy_1 = aten._to_copy.default(arg1_1, dtype=bf16)  # bf16[4, 5] | {MARK}
        t_1 = aten.t.default(_to_copy_1)  # bf16[5, 4] strides (1, 5)
        mm_1 = aten.mm.default(_to_copy_1, t_1)  # bf16[4, 4]
        _to_copy_2 = aten._to_copy.default(arg2_1, dtype=bf16)  # bf16[5, 6] | {MARK}
        t_2 = aten.t.default(_to_copy_2)  # bf16[6, 5] strides (1, 6)
        mm_2 = aten.mm.default(_to_copy_2, t_2)  # bf16[5, 5]
        _to_copy_3 = aten._to_copy.default(arg3_1, dtype=bf16)  # bf16[6, 7] | {MARK}
        t_3 = aten.t.default(_to_copy_3)  # bf16[7, 6] strides (1, 7)
        mm_3 = aten.mm.default(_to_copy_3, t_3)  # bf16[6, 6]
        return [mm, mm_1, mm_2, mm_3]
        """,
        f"""
        arg0_1: f32[3, 4]
        arg1_1: f32[4, 5]
        arg2_1: f32[5, 6]
        arg3_1: f32[6, 7]
        cast_all = cast_all([arg0_1, arg1_1], bf16)  # {MARK}
        getitem = cast_all[0]  # bf16[3, 4] | {MARK}
        getitem_1 = cast_all[1]  # bf16[4, 5] | {MARK}
        t = aten.t.default(getitem)  # bf16[4, 3] strides (1, 4)
        mm = aten.mm.default(getitem, t)  # bf16[3, 3]
        t_1 = aten.t.default(getitem_1)  # bf16[5, 4] strides (1, 5)
        mm_1 = aten.mm.default(getitem_1, t_1)  # bf16[4, 4]
        _to_copy = aten._to_copy.default(arg2_1, dtype=bf16)  # bf16[5, 6] | {MARK}
        t_2 = aten.t.default(_to_copy)  # bf16[6, 5] strides (1, 6)
        mm_2 = aten.mm.default(_to_copy, t_2)  # bf16[5, 5]
        _to_copy_1 = aten._to_copy.default(arg3_1, dtype=bf16)  # bf16[6, 7] | {MARK}
        t_3 = aten.t.default(_to_copy_1)  # bf16[7, 6] strides (1, 7)
        mm_3 = aten.mm.default(_to_copy_1, t_3)  # bf16[6, 6]
        return [mm, mm_1, mm_2, mm_3]
        """,
        gm,
    )


def test_a_cast_that_needs_the_result_of_another_is_of_a_later_call() -> None:
    def function(*weights: Tensor) -> list[Tensor]:
        half = [one.bfloat16() for one in weights]
        first = half[0] @ half[0].t()
        return [first.float(), *((one @ one.t()).float() for one in half[1:])]

    gm = placed(function, *WEIGHTS)
    assert_fx_rewrites(
        CallForeach(),
        f"""
        arg0_1: f32[3, 4]
        arg1_1: f32[4, 5]
        arg2_1: f32[5, 6]
        arg3_1: f32[6, 7]
        _to_copy = aten._to_copy.default(arg0_1, dtype=bf16)  # bf16[3, 4] | {MARK}
        _to_copy_1 = aten._to_copy.default(arg1_1, dtype=bf16)  # bf16[4, 5] | {MARK}
        _to_copy_2 = aten._to_copy.default(arg2_1, dtype=bf16)  # bf16[5, 6] | {MARK}
        _to_copy_3 = aten._to_copy.default(arg3_1, dtype=bf16)  # bf16[6, 7] | {MARK}
        t = aten.t.default(_to_copy)  # bf16[4, 3] strides (1, 4)
        mm = aten.mm.default(_to_copy, t)  # bf16[3, 3]
        _to_copy_4 = aten._to_copy.default(mm, dtype=f32)  # f32[3, 3] | {MARK}
        t_1 = aten.t.default(_to_copy_1)  # bf16[5, 4] strides (1, 5)
        mm_1 = aten.mm.default(_to_copy_1, t_1)  # bf16[4, 4]
        _to_copy_5 = aten._to_copy.default(mm_1, dtype=f32)  # f32[4, 4] | {MARK}
        t_2 = aten.t.default(_to_copy_2)  # bf16[6, 5] strides (1, 6)
        mm_2 = aten.mm.default(_to_copy_2, t_2)  # bf16[5, 5]
        _to_copy_6 = aten._to_copy.default(mm_2, dtype=f32)  # f32[5, 5] | {MARK}
        t_3 = aten.t.default(_to_copy_3)  # bf16[7, 6] strides (1, 7)
        mm_3 = aten.mm.default(_to_copy_3, t_3)  # bf16[6, 6]
        _to_copy_7 = aten._to_copy.default(mm_3, dtype=f32)  # f32[6, 6] | {MARK}
        return [_to_copy_4, _to_copy_5, _to_copy_6, _to_copy_7]
        """,
        f"""
        arg0_1: f32[3, 4]
        arg1_1: f32[4, 5]
        arg2_1: f32[5, 6]
        arg3_1: f32[6, 7]
        cast_all = cast_all([arg0_1, arg1_1, arg2_1, arg3_1], bf16)  # {MARK}
        getitem = cast_all[0]  # bf16[3, 4] | {MARK}
        getitem_1 = cast_all[1]  # bf16[4, 5] | {MARK}
        getitem_2 = cast_all[2]  # bf16[5, 6] | {MARK}
        getitem_3 = cast_all[3]  # bf16[6, 7] | {MARK}
        t = aten.t.default(getitem)  # bf16[4, 3] strides (1, 4)
        mm = aten.mm.default(getitem, t)  # bf16[3, 3]
        t_1 = aten.t.default(getitem_1)  # bf16[5, 4] strides (1, 5)
        mm_1 = aten.mm.default(getitem_1, t_1)  # bf16[4, 4]
        t_2 = aten.t.default(getitem_2)  # bf16[6, 5] strides (1, 6)
        mm_2 = aten.mm.default(getitem_2, t_2)  # bf16[5, 5]
        t_3 = aten.t.default(getitem_3)  # bf16[7, 6] strides (1, 7)
        mm_3 = aten.mm.default(getitem_3, t_3)  # bf16[6, 6]
        cast_all_1 = cast_all([mm, mm_1, mm_2, mm_3], f32)  # {MARK}
        getitem_4 = cast_all_1[0]  # f32[3, 3] | {MARK}
        getitem_5 = cast_all_1[1]  # f32[4, 4] | {MARK}
        getitem_6 = cast_all_1[2]  # f32[5, 5] | {MARK}
        getitem_7 = cast_all_1[3]  # f32[6, 6] | {MARK}
        return [getitem_4, getitem_5, getitem_6, getitem_7]
        """,
        gm,
    )


def test_counts_of_batches_are_one_call() -> None:
    counts = [torch.tensor(number) for number in range(5)]
    gm = placed(lambda *c: [one + 1 for one in c], *counts)
    assert_fx_rewrites(
        CallForeach(),
        f"""
        arg0_1: i64[]
        arg1_1: i64[]
        arg2_1: i64[]
        arg3_1: i64[]
        arg4_1: i64[]
        add = aten.add.Tensor(arg0_1, 1)  # i64[] | {MARK}
        add_1 = aten.add.Tensor(arg1_1, 1)  # i64[] | {MARK}
        add_2 = aten.add.Tensor(arg2_1, 1)  # i64[] | {MARK}
        add_3 = aten.add.Tensor(arg3_1, 1)  # i64[] | {MARK}
        add_4 = aten.add.Tensor(arg4_1, 1)  # i64[] | {MARK}
        return [add, add_1, add_2, add_3, add_4]
        """,
        f"""
        arg0_1: i64[]
        arg1_1: i64[]
        arg2_1: i64[]
        arg3_1: i64[]
        arg4_1: i64[]
        add_to_all = add_to_all([arg0_1, arg1_1, arg2_1, arg3_1, arg4_1], 1)  # {MARK}
        getitem = add_to_all[0]  # i64[] | {MARK}
        getitem_1 = add_to_all[1]  # i64[] | {MARK}
        getitem_2 = add_to_all[2]  # i64[] | {MARK}
        getitem_3 = add_to_all[3]  # i64[] | {MARK}
        getitem_4 = add_to_all[4]  # i64[] | {MARK}
        return [getitem, getitem_1, getitem_2, getitem_3, getitem_4]
        """,
        gm,
        inputs=counts,
    )


def test_results_keep_strides() -> None:
    weights = [one.t() for one in WEIGHTS]
    gm = placed(products, *weights)
    assert_fx_rewrites(
        CallForeach(),
        f"""
        arg0_1: f32[4, 3] strides (1, 4)
        arg1_1: f32[5, 4] strides (1, 5)
        arg2_1: f32[6, 5] strides (1, 6)
        arg3_1: f32[7, 6] strides (1, 7)
        _to_copy = aten._to_copy.default(arg0_1, dtype=bf16)  # bf16[4, 3] strides (1, 4) | {MARK}
        t = aten.t.default(_to_copy)  # bf16[3, 4]
        mm = aten.mm.default(_to_copy, t)  # bf16[4, 4]
        _to_copy_1 = aten._to_copy.default(arg1_1, dtype=bf16)  # bf16[5, 4] strides (1, 5) | {MARK}
        t_1 = aten.t.default(_to_copy_1)  # bf16[4, 5]
        mm_1 = aten.mm.default(_to_copy_1, t_1)  # bf16[5, 5]
        _to_copy_2 = aten._to_copy.default(arg2_1, dtype=bf16)  # bf16[6, 5] strides (1, 6) | {MARK}
        t_2 = aten.t.default(_to_copy_2)  # bf16[5, 6]
        mm_2 = aten.mm.default(_to_copy_2, t_2)  # bf16[6, 6]
        _to_copy_3 = aten._to_copy.default(arg3_1, dtype=bf16)  # bf16[7, 6] strides (1, 7) | {MARK}
        t_3 = aten.t.default(_to_copy_3)  # bf16[6, 7]
        mm_3 = aten.mm.default(_to_copy_3, t_3)  # bf16[7, 7]
        return [mm, mm_1, mm_2, mm_3]
        """,
        f"""
        arg0_1: f32[4, 3] strides (1, 4)
        arg1_1: f32[5, 4] strides (1, 5)
        arg2_1: f32[6, 5] strides (1, 6)
        arg3_1: f32[7, 6] strides (1, 7)
        cast_all = cast_all([arg0_1, arg1_1, arg2_1, arg3_1], bf16)  # {MARK}
        getitem = cast_all[0]  # bf16[4, 3] strides (1, 4) | {MARK}
        getitem_1 = cast_all[1]  # bf16[5, 4] strides (1, 5) | {MARK}
        getitem_2 = cast_all[2]  # bf16[6, 5] strides (1, 6) | {MARK}
        getitem_3 = cast_all[3]  # bf16[7, 6] strides (1, 7) | {MARK}
        t = aten.t.default(getitem)  # bf16[3, 4]
        mm = aten.mm.default(getitem, t)  # bf16[4, 4]
        t_1 = aten.t.default(getitem_1)  # bf16[4, 5]
        mm_1 = aten.mm.default(getitem_1, t_1)  # bf16[5, 5]
        t_2 = aten.t.default(getitem_2)  # bf16[5, 6]
        mm_2 = aten.mm.default(getitem_2, t_2)  # bf16[6, 6]
        t_3 = aten.t.default(getitem_3)  # bf16[6, 7]
        mm_3 = aten.mm.default(getitem_3, t_3)  # bf16[7, 7]
        return [mm, mm_1, mm_2, mm_3]
        """,
        gm,
    )
    assert [one.stride() for one in cast_all(weights, torch.bfloat16)] == [one.stride() for one in weights]
