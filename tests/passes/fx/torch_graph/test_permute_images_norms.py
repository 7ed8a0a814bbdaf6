"""Batch norms between convolutions become sums and arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from image_graphs import CHOSEN, CLOSE, IN_TORCH, PADDED, W, X, assert_permuted, convolution, random
from run_twice import run_twice
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.passes.fx.torch_graph.permute_images import PermuteImages
from ort_dynamo.testing import assert_close
from ort_dynamo.torch_internals.kernels.operators import aten


def test_a_batch_norm_becomes_sums_and_arithmetic() -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor) -> Any:
        x = convolution(x, w)
        return aten._native_batch_norm_legit_functional(x, scale, shift, mean, variance, True, 0.1, 1e-5)

    inputs = X, W, *(random(8).abs() + 1 for _ in range(4))
    assert_permuted(
        function,
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        scale_1: f32[8]
        shift_1: f32[8]
        mean_1: f32[8]
        variance_1: f32[8]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        _native_batch_norm_legit_functional = aten._native_batch_norm_legit_functional.default(
            convolution, scale_1, shift_1, mean_1, variance_1, True, 0.1, 1e-05)
        getitem = _native_batch_norm_legit_functional[0]  # f32[2, 8, 8, 8]
        getitem_1 = _native_batch_norm_legit_functional[1]  # f32[8]
        getitem_2 = _native_batch_norm_legit_functional[2]  # f32[8]
        getitem_3 = _native_batch_norm_legit_functional[3]  # f32[8]
        getitem_4 = _native_batch_norm_legit_functional[4]  # f32[8]
        return (getitem, getitem_1, getitem_2, getitem_3, getitem_4)
        """,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        scale_1: f32[8]
        shift_1: f32[8]
        mean_1: f32[8]
        variance_1: f32[8]
        permute = aten.permute.default(x_1, [0, 2, 3, 1])  # f32[2, 8, 8, 4] strides (256, 8, 1, 64)
        clone = aten.clone.default(permute, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 4]
        permute_1 = aten.permute.default(clone, [0, 3, 1, 2])  # f32[2, 4, 8, 8] channels_last
        clone_1 = aten.clone.default(w_1, memory_format=torch.channels_last)  # f32[8, 4, 3, 3] channels_last | {CHOSEN}
        convolution = aten.convolution.default(permute_1, clone_1, {PADDED})
            # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute_2 = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        view = aten.view.default(permute_2, [128, 8])  # f32[128, 8]
        slice = aten.slice.Tensor(view, 0, 0, 64)  # f32[64, 8]
        sum = aten.sum.dim_IntList(slice, [0])  # f32[8]
        mul = aten.mul.Tensor(sum, 0.015625)  # f32[8]
        sub = aten.sub.Tensor(permute_2, mul)  # f32[2, 8, 8, 8]
        sum_1 = aten.sum.dim_IntList(sub, [0, 1, 2])  # f32[8]
        mul_1 = aten.mul.Tensor(sum_1, 0.0078125)  # f32[8]
        mul_2 = aten.mul.Tensor(sub, sub)  # f32[2, 8, 8, 8]
        sum_2 = aten.sum.dim_IntList(mul_2, [0, 1, 2])  # f32[8]
        mul_3 = aten.mul.Tensor(sum_2, 0.0078125)  # f32[8]
        add = aten.add.Tensor(mul, mul_1)  # f32[8]
        mul_4 = aten.mul.Tensor(mul_1, mul_1)  # f32[8]
        sub_1 = aten.sub.Tensor(mul_3, mul_4)  # f32[8]
        relu = aten.relu.default(sub_1)  # f32[8]
        add_1 = aten.add.Tensor(relu, 1e-05)  # f32[8]
        rsqrt = aten.rsqrt.default(add_1)  # f32[8]
        sub_2 = aten.sub.Tensor(permute_2, add)  # f32[2, 8, 8, 8]
        mul_5 = aten.mul.Tensor(sub_2, rsqrt)  # f32[2, 8, 8, 8]
        mul_6 = aten.mul.Tensor(mul_5, scale_1)  # f32[2, 8, 8, 8]
        add_2 = aten.add.Tensor(mul_6, shift_1)  # f32[2, 8, 8, 8]
        permute_3 = aten.permute.default(add_2, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        mul_7 = aten.mul.Tensor(relu, 1.0078740157480315)  # f32[8]
        mul_8 = aten.mul.Tensor(mean_1, 0.9)  # f32[8]
        mul_9 = aten.mul.Tensor(add, 0.1)  # f32[8]
        add_3 = aten.add.Tensor(mul_8, mul_9)  # f32[8]
        mul_10 = aten.mul.Tensor(variance_1, 0.9)  # f32[8]
        mul_11 = aten.mul.Tensor(mul_7, 0.1)  # f32[8]
        add_4 = aten.add.Tensor(mul_10, mul_11)  # f32[8]
        clone_2 = aten.clone.default(permute_3, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        return (clone_2, add, rsqrt, add_3, add_4)
        """,
    )


def test_its_gradient_becomes_sums_and_arithmetic() -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, gradient: Tensor) -> Any:
        x = convolution(x, w)
        _, mean, deviation = aten._native_batch_norm_legit.no_stats(x, scale, None, True, 0.1, 1e-5)
        given = (gradient, x, scale, None, None, mean, deviation, True, 1e-5, [True, True, True])
        return aten.native_batch_norm_backward(*given)

    inputs = X, W, random(8), random(2, 8, 8, 8)
    assert_permuted(
        function,
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        scale_1: f32[8]
        gradient_1: f32[2, 8, 8, 8]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        _native_batch_norm_legit = aten._native_batch_norm_legit.no_stats(convolution, scale_1, None, True, 0.1, 1e-05)
        getitem = _native_batch_norm_legit[0]  # f32[2, 8, 8, 8]
        getitem_1 = _native_batch_norm_legit[1]  # f32[8]
        getitem_2 = _native_batch_norm_legit[2]  # f32[8]
        native_batch_norm_backward = aten.native_batch_norm_backward.default(
            gradient_1, convolution, scale_1, None, None, getitem_1, getitem_2, True, 1e-05, [True, True, True])
        getitem_3 = native_batch_norm_backward[0]  # f32[2, 8, 8, 8]
        getitem_4 = native_batch_norm_backward[1]  # f32[8]
        getitem_5 = native_batch_norm_backward[2]  # f32[8]
        return (getitem_3, getitem_4, getitem_5)
        """,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        scale_1: f32[8]
        gradient_1: f32[2, 8, 8, 8]
        permute = aten.permute.default(x_1, [0, 2, 3, 1])  # f32[2, 8, 8, 4] strides (256, 8, 1, 64)
        clone = aten.clone.default(permute, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 4]
        permute_1 = aten.permute.default(clone, [0, 3, 1, 2])  # f32[2, 4, 8, 8] channels_last
        clone_1 = aten.clone.default(w_1, memory_format=torch.channels_last)  # f32[8, 4, 3, 3] channels_last | {CHOSEN}
        convolution = aten.convolution.default(permute_1, clone_1, {PADDED})
            # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute_2 = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        view = aten.view.default(permute_2, [128, 8])  # f32[128, 8]
        slice = aten.slice.Tensor(view, 0, 0, 64)  # f32[64, 8]
        sum = aten.sum.dim_IntList(slice, [0])  # f32[8]
        mul = aten.mul.Tensor(sum, 0.015625)  # f32[8]
        sub = aten.sub.Tensor(permute_2, mul)  # f32[2, 8, 8, 8]
        sum_1 = aten.sum.dim_IntList(sub, [0, 1, 2])  # f32[8]
        mul_1 = aten.mul.Tensor(sum_1, 0.0078125)  # f32[8]
        mul_2 = aten.mul.Tensor(sub, sub)  # f32[2, 8, 8, 8]
        sum_2 = aten.sum.dim_IntList(mul_2, [0, 1, 2])  # f32[8]
        mul_3 = aten.mul.Tensor(sum_2, 0.0078125)  # f32[8]
        add = aten.add.Tensor(mul, mul_1)  # f32[8]
        mul_4 = aten.mul.Tensor(mul_1, mul_1)  # f32[8]
        sub_1 = aten.sub.Tensor(mul_3, mul_4)  # f32[8]
        relu = aten.relu.default(sub_1)  # f32[8]
        add_1 = aten.add.Tensor(relu, 1e-05)  # f32[8]
        rsqrt = aten.rsqrt.default(add_1)  # f32[8]
        sub_2 = aten.sub.Tensor(permute_2, add)  # f32[2, 8, 8, 8]
        mul_5 = aten.mul.Tensor(sub_2, rsqrt)  # f32[2, 8, 8, 8]
        mul_6 = aten.mul.Tensor(mul_5, scale_1)  # f32[2, 8, 8, 8]
        permute_3 = aten.permute.default(gradient_1, [0, 2, 3, 1])  # f32[2, 8, 8, 8] strides (512, 8, 1, 64)
        sub_3 = aten.sub.Tensor(permute_2, add)  # f32[2, 8, 8, 8]
        mul_7 = aten.mul.Tensor(sub_3, rsqrt)  # f32[2, 8, 8, 8]
        sum_3 = aten.sum.dim_IntList(permute_3, [0, 1, 2])  # f32[8]
        mul_8 = aten.mul.Tensor(permute_3, mul_7)  # f32[2, 8, 8, 8] strides (512, 8, 1, 64)
        sum_4 = aten.sum.dim_IntList(mul_8, [0, 1, 2])  # f32[8]
        mul_9 = aten.mul.Tensor(mul_7, sum_4)  # f32[2, 8, 8, 8]
        add_2 = aten.add.Tensor(mul_9, sum_3)  # f32[2, 8, 8, 8]
        mul_10 = aten.mul.Tensor(add_2, 0.0078125)  # f32[2, 8, 8, 8]
        sub_4 = aten.sub.Tensor(permute_3, mul_10)  # f32[2, 8, 8, 8] strides (512, 8, 1, 64)
        mul_11 = aten.mul.Tensor(sub_4, rsqrt)  # f32[2, 8, 8, 8] strides (512, 8, 1, 64)
        mul_12 = aten.mul.Tensor(mul_11, scale_1)  # f32[2, 8, 8, 8] strides (512, 8, 1, 64)
        permute_4 = aten.permute.default(mul_12, [0, 3, 1, 2])  # f32[2, 8, 8, 8]
        return (permute_4, sum_4, sum_3)
        """,
    )


def test_a_batch_norm_in_eval_is_left_alone() -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, mean: Tensor, variance: Tensor) -> Any:
        x = convolution(x, w)
        return aten._native_batch_norm_legit_functional(x, scale, scale, mean, variance, False, 0.1, 1e-5)

    inputs = X, W, *(random(8).abs() + 1 for _ in range(3))
    assert_permuted(
        function,
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        scale_1: f32[8]
        mean_1: f32[8]
        variance_1: f32[8]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        _native_batch_norm_legit_functional = aten._native_batch_norm_legit_functional.default(
            convolution, scale_1, scale_1, mean_1, variance_1, False, 0.1, 1e-05)
        getitem = _native_batch_norm_legit_functional[0]  # f32[2, 8, 8, 8]
        getitem_1 = _native_batch_norm_legit_functional[1]  # f32[0]
        getitem_2 = _native_batch_norm_legit_functional[2]  # f32[0]
        getitem_3 = _native_batch_norm_legit_functional[3]  # f32[8]
        getitem_4 = _native_batch_norm_legit_functional[4]  # f32[8]
        return (getitem, getitem_1, getitem_2, getitem_3, getitem_4)
        """,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        scale_1: f32[8]
        mean_1: f32[8]
        variance_1: f32[8]
        permute = aten.permute.default(x_1, [0, 2, 3, 1])  # f32[2, 8, 8, 4] strides (256, 8, 1, 64)
        clone = aten.clone.default(permute, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 4]
        permute_1 = aten.permute.default(clone, [0, 3, 1, 2])  # f32[2, 4, 8, 8] channels_last
        clone_1 = aten.clone.default(w_1, memory_format=torch.channels_last)  # f32[8, 4, 3, 3] channels_last | {CHOSEN}
        convolution = aten.convolution.default(permute_1, clone_1, {PADDED})
            # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute_2 = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        clone_2 = aten.clone.default(convolution, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        _native_batch_norm_legit_functional = aten._native_batch_norm_legit_functional.default(
            clone_2, scale_1, scale_1, mean_1, variance_1, False, 0.1, 1e-05)
        getitem = _native_batch_norm_legit_functional[0]  # f32[2, 8, 8, 8]
        getitem_1 = _native_batch_norm_legit_functional[1]  # f32[0]
        getitem_2 = _native_batch_norm_legit_functional[2]  # f32[0]
        getitem_3 = _native_batch_norm_legit_functional[3]  # f32[8]
        getitem_4 = _native_batch_norm_legit_functional[4]  # f32[8]
        return (getitem, getitem_1, getitem_2, getitem_3, getitem_4)
        """,
    )


def test_the_gradient_of_a_batch_norm_in_eval_is_left_alone() -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, gradient: Tensor, mean: Tensor, variance: Tensor) -> Any:
        x = convolution(x, w)
        given = (gradient, x, scale, mean, variance, None, None, False, 1e-5, [True, True, True])
        return convolution(aten.native_batch_norm_backward(*given)[0], w.transpose(0, 1))

    given = X, W, random(8), random(2, 8, 8, 8), random(8), random(8).abs() + 1
    gm = make_fx(function, tracing_mode="fake")(*given)
    run_twice(PermuteImages(), gm)
    (norm,) = gm.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default)
    assert [None if one is None else one.name for one in norm.args[3:7]] == ["mean_1", "variance_1", None, None]
    assert_close(gm(*given), function(*given), "image", CLOSE)


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_as_exact_as_torchs(dtype: torch.dtype, offset: float) -> None:
    """The first image lies elsewhere than the others, and the mean far from 0."""
    x = random(8, 4, 16, 16) + offset
    x[0] += 10
    x, w = x.to(dtype), torch.eye(4)[:, :, None, None].to(dtype)

    def function(x: Tensor, w: Tensor, scale: Tensor, mean: Tensor, variance: Tensor) -> Any:
        x = convolution(x, w)
        return aten._native_batch_norm_legit_functional(x, scale, scale, mean, variance, True, 1.0, 1e-5)

    given = x, w, torch.ones(4), torch.zeros(4), torch.ones(4)
    gm = make_fx(function, tracing_mode="fake")(*given)
    eager = gm(*given)[3:]  # with this momentum, the mean and the variance, which are float32
    run_twice(PermuteImages(), gm)
    ours = gm(*given)[3:]
    exact = x.double()
    for value, other, true in zip(ours, eager, (exact.mean((0, 2, 3)), exact.var((0, 2, 3))), strict=True):
        error, own = ((one.double() - true).abs().max() / true.abs().max() for one in (value, other))
        assert error <= max(2 * own, 4e-6)  # 32 units in the last place: the CPU's sum adds in order
