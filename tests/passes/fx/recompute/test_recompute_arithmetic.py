"""Recomputing arithmetic whose arguments are saved: a joint graph in, tags out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from joint_graphs import assert_tags, saved_bytes, weight
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional as F

from ort_dynamo.fx_testing import assert_fx_untouched
from ort_dynamo.passes.fx.recompute.recompute_arithmetic import RecomputeArithmetic

Capture = Callable[..., GraphModule]


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


# -- one number ----------------------------------------------------------------------------------------------------


def test_scaled_and_shifted_tensors_are_recomputed(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w, v: (gelu(x @ w) @ v).sum(), weight(2, 3), weight(3, 4), weight(4, 2))
    assert saved_bytes(gm) == 5 * 4 * 8  # the product, its half, tanh, one more than that, and the whole
    assert_tags(
        RecomputeArithmetic(),
        gm,
        """
        mm = aten.mm.default(primals_1, primals_2)  # f32[2, 4]
        mul = aten.mul.Tensor(mm, 0.5)  # f32[2, 4] | MUST_RECOMPUTE
        pow = aten.pow.Tensor_Scalar(mm, 3.0)  # f32[2, 4]
        mul_1 = aten.mul.Tensor(pow, 0.04)  # f32[2, 4]
        add = aten.add.Tensor(mm, mul_1)  # f32[2, 4]
        mul_2 = aten.mul.Tensor(add, 0.8)  # f32[2, 4]
        tanh = aten.tanh.default(mul_2)  # f32[2, 4]
        add_1 = aten.add.Tensor(tanh, 1.0)  # f32[2, 4] | MUST_RECOMPUTE
        mul_3 = aten.mul.Tensor(mul, add_1)  # f32[2, 4]
        mm_1 = aten.mm.default(mul_3, primals_3)  # f32[2, 2]
        sum = aten.sum.default(mm_1)  # f32[]
        """,
    )
    assert saved_bytes(gm) == 3 * 4 * 8


def test_a_chain_is_recomputed_from_its_start(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        half = product / 2
        return (product.sin() + half.sin() + (half + 1).sin()).sum()

    gm = joint_graph(function, weight(2, 3), weight(3, 4))
    assert saved_bytes(gm) == 3 * 4 * 8
    assert_tags(
        RecomputeArithmetic(),
        gm,
        """
        mm = aten.mm.default(primals_1, primals_2)  # f32[2, 4]
        div = aten.div.Tensor(mm, 2)  # f32[2, 4] | MUST_RECOMPUTE
        sin = aten.sin.default(mm)  # f32[2, 4]
        sin_1 = aten.sin.default(div)  # f32[2, 4]
        add = aten.add.Tensor(sin, sin_1)  # f32[2, 4]
        add_1 = aten.add.Tensor(div, 1)  # f32[2, 4] | MUST_RECOMPUTE
        sin_2 = aten.sin.default(add_1)  # f32[2, 4]
        add_2 = aten.add.Tensor(add, sin_2)  # f32[2, 4]
        sum = aten.sum.default(add_2)  # f32[]
        """,
    )
    assert saved_bytes(gm) == 4 * 8


def test_an_unsaved_step_towards_a_saved_tensor_is_not_tagged(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        return (product.sin() + (product / 2 + 1).sin()).sum()  # of a sum no gradient reads its arguments

    gm = joint_graph(function, weight(2, 3), weight(3, 4))
    assert_fx_untouched(RecomputeArithmetic(), gm)
    assert saved_bytes(gm) == 2 * 4 * 8


def test_a_scaled_tensor_whose_source_is_not_saved_stays_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (x @ w / 2).sin().sum(), weight(2, 3), weight(3, 4))
    assert_fx_untouched(RecomputeArithmetic(), gm)


def test_an_input_that_the_backward_does_not_read_may_be_freed(joint_graph: Capture) -> None:
    assert_fx_untouched(RecomputeArithmetic(), joint_graph(lambda x: (x / 2).sin().sum(), weight(4)))
    gm = joint_graph(lambda x: ((x / 2).sin() * x.cos()).sum(), weight(4))
    assert_tags(
        RecomputeArithmetic(),
        gm,
        """
        div = aten.div.Tensor(primals_1, 2)  # f32[4] | MUST_RECOMPUTE
        sin = aten.sin.default(div)  # f32[4]
        cos = aten.cos.default(primals_1)  # f32[4]
        mul = aten.mul.Tensor(sin, cos)  # f32[4]
        sum = aten.sum.default(mul)  # f32[]
        """,
    )


def test_two_tensors_are_no_number(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        return ((product + product.sin()).sin() + product.cos()).sum()

    assert_fx_untouched(RecomputeArithmetic(), joint_graph(function, weight(2, 3), weight(3, 4)))


# -- several tensors -----------------------------------------------------------------------------------------------


def gated(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
    return (((x @ w).sigmoid() * (x @ v)) @ u).sum()


GATED = (weight(2, 3), weight(3, 4), weight(3, 4), weight(4, 2))
"""`gated` saves the sigmoid, the second matmul and their product, 32 bytes each."""


def test_a_large_product_of_two_saved_tensors_is_recomputed(joint_graph: Capture) -> None:
    gm = joint_graph(gated, *GATED)
    assert saved_bytes(gm) == 3 * 32
    assert_tags(
        RecomputeArithmetic(32),
        gm,
        """
        mm = aten.mm.default(primals_1, primals_2)  # f32[2, 4]
        sigmoid = aten.sigmoid.default(mm)  # f32[2, 4] | gate
        mm_1 = aten.mm.default(primals_1, primals_3)  # f32[2, 4]
        mul = aten.mul.Tensor(sigmoid, mm_1)  # f32[2, 4] | MUST_RECOMPUTE
        mm_2 = aten.mm.default(mul, primals_4)  # f32[2, 2]
        sum = aten.sum.default(mm_2)  # f32[]
        """,
    )
    assert saved_bytes(gm) == 2 * 32


def test_a_smaller_product_stays(joint_graph: Capture) -> None:
    assert_fx_untouched(RecomputeArithmetic(33), joint_graph(gated, *GATED))
    assert_fx_untouched(RecomputeArithmetic(), joint_graph(gated, *GATED))


def test_a_product_that_the_program_gets_lives_anyway(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        product = (x @ w).sigmoid() * (x @ v)
        return product, product @ u

    assert_fx_untouched(RecomputeArithmetic(0), joint_graph(function, *GATED))


def test_other_operators_than_arithmetic_stay_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w, v: (F.gelu(x @ w) @ v).sum(), weight(2, 3), weight(3, 4), weight(4, 2))
    assert_fx_untouched(RecomputeArithmetic(0), gm)


def test_a_normalization_saves_only_its_statistics(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor, v: Tensor) -> Tensor:
        return (F.layer_norm(x @ w, (4,), scale, bias) @ v).sum()

    inputs = (weight(2, 3), weight(3, 4), weight(4), weight(4), weight(4, 2))
    gm = joint_graph(function, *inputs)
    assert saved_bytes(gm) == 32 + 32 + 2 * 8  # the input, the result, and mean and deviation of two rows
    assert_fx_untouched(RecomputeArithmetic(33), gm)
    assert_tags(
        RecomputeArithmetic(32),
        gm,
        """
        mm = aten.mm.default(primals_1, primals_2)  # f32[2, 4]
        native_layer_norm = aten.native_layer_norm.default(mm, [4], primals_3, primals_4, 1e-05)
            # MUST_RECOMPUTE
        getitem = native_layer_norm[0]  # f32[2, 4] | MUST_RECOMPUTE
        getitem_1 = native_layer_norm[1]  # f32[2, 1]
        getitem_2 = native_layer_norm[2]  # f32[2, 1]
        mm_1 = aten.mm.default(getitem, primals_5)  # f32[2, 2]
        sum = aten.sum.default(mm_1)  # f32[]
        """,
    )
    assert saved_bytes(gm) == 32 + 2 * 8


def test_of_an_rms_normalization_that_is_spelled_out_too(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, v: Tensor) -> Tensor:
        return (F.rms_norm(x @ w, (4,), scale) @ v).sum()

    gm = joint_graph(function, weight(2, 3), weight(3, 4), weight(4), weight(4, 2))
    # The input, the normalized tensor, the scaled one, and the root mean squares.
    assert saved_bytes(gm) == 3 * 32 + 8
    assert_tags(
        RecomputeArithmetic(32),
        gm,
        """
        mm = aten.mm.default(primals_1, primals_2)  # f32[2, 4]
        pow = aten.pow.Tensor_Scalar(mm, 2)  # f32[2, 4]
        mean = aten.mean.dim(pow, [1], True)  # f32[2, 1]
        add = aten.add.Scalar(mean, 1.1920928955078125e-07)  # f32[2, 1]
        rsqrt = aten.rsqrt.default(add)  # f32[2, 1]
        mul = aten.mul.Tensor(mm, rsqrt)  # f32[2, 4] | MUST_RECOMPUTE
        mul_1 = aten.mul.Tensor(mul, primals_3)  # f32[2, 4] | MUST_RECOMPUTE
        mm_1 = aten.mm.default(mul_1, primals_4)  # f32[2, 2]
        sum = aten.sum.default(mm_1)  # f32[]
        """,
    )
    assert saved_bytes(gm) == 32 + 8


def test_a_normalization_whose_result_nothing_keeps_is_made_once(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: F.layer_norm(x @ w, (4,)).sum(), weight(2, 3), weight(3, 4))
    assert_fx_untouched(RecomputeArithmetic(0), gm)
