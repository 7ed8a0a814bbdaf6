"""Tests of channels_last between convolutions: which tensors get it, and which runtime computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from image_graphs import CHOSEN, IN_TORCH, PADDED, PIXELS, SMALL, W, X, assert_permuted, convolution, random, traced
from run_twice import run_twice
from torch import Tensor

from ort_dynamo.fx_testing import assert_fx_untouched
from ort_dynamo.passes.fx.torch_graph.permute_images import PermuteImages
from ort_dynamo.testing import TOLERANCES
from ort_dynamo.torch_internals.kernels.operators import aten


def test_operators_between_two_convolutions_have_channels_last() -> None:
    inputs = X, W, SMALL
    assert_permuted(
        lambda x, w, v: convolution(F.relu(convolution(x, w) * 2), v),
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        v_1: f32[8, 8, 1, 1]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        mul = aten.mul.Tensor(convolution, 2)  # f32[2, 8, 8, 8]
        relu = aten.relu.default(mul)  # f32[2, 8, 8, 8]
        convolution_1 = aten.convolution.default(relu, v_1, {PIXELS})  # f32[2, 8, 8, 8]
        return convolution_1
        """,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        v_1: f32[8, 8, 1, 1]
        permute = aten.permute.default(x_1, [0, 2, 3, 1])  # f32[2, 8, 8, 4] strides (256, 8, 1, 64)
        clone = aten.clone.default(permute, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 4]
        permute_1 = aten.permute.default(clone, [0, 3, 1, 2])  # f32[2, 4, 8, 8] channels_last
        clone_1 = aten.clone.default(w_1, memory_format=torch.channels_last)  # f32[8, 4, 3, 3] channels_last | {CHOSEN}
        convolution = aten.convolution.default(permute_1, clone_1, {PADDED})
            # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute_2 = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        mul = aten.mul.Tensor(permute_2, 2)  # f32[2, 8, 8, 8]
        relu = aten.relu.default(mul)  # f32[2, 8, 8, 8]
        permute_3 = aten.permute.default(relu, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        convolution_1 = aten.convolution.default(permute_3, v_1, {PIXELS})  # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        clone_2 = aten.clone.default(convolution_1, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        permute_4 = aten.permute.default(convolution_1, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        return clone_2
        """,
    )


def test_a_weight_is_permuted_once_with_its_cast() -> None:
    def twice(x: Tensor, w: Tensor) -> Tensor:
        half = w.bfloat16()
        return convolution(F.relu(convolution(x.bfloat16(), half)), half)

    inputs = random(2, 4, 8, 8), random(4, 4, 3, 3)
    assert_permuted(
        twice,
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[4, 4, 3, 3]
        _to_copy = aten._to_copy.default(w_1, dtype=bf16)  # bf16[4, 4, 3, 3]
        _to_copy_1 = aten._to_copy.default(x_1, dtype=bf16)  # bf16[2, 4, 8, 8]
        convolution = aten.convolution.default(_to_copy_1, _to_copy, {PADDED})  # bf16[2, 4, 8, 8]
        relu = aten.relu.default(convolution)  # bf16[2, 4, 8, 8]
        convolution_1 = aten.convolution.default(relu, _to_copy, {PADDED})  # bf16[2, 4, 8, 8]
        return convolution_1
        """,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[4, 4, 3, 3]
        _to_copy = aten._to_copy.default(w_1, dtype=bf16)  # bf16[4, 4, 3, 3]
        _to_copy_1 = aten._to_copy.default(x_1, dtype=bf16)  # bf16[2, 4, 8, 8]
        permute = aten.permute.default(_to_copy_1, [0, 2, 3, 1])  # bf16[2, 8, 8, 4] strides (256, 8, 1, 64)
        clone = aten.clone.default(permute, memory_format=torch.contiguous_format)  # bf16[2, 8, 8, 4]
        permute_1 = aten.permute.default(clone, [0, 3, 1, 2])  # bf16[2, 4, 8, 8] channels_last
        _to_copy_2 = aten._to_copy.default(w_1, dtype=bf16, memory_format=torch.channels_last)
            # bf16[4, 4, 3, 3] channels_last | {CHOSEN}
        convolution = aten.convolution.default(permute_1, _to_copy_2, {PADDED})
            # bf16[2, 4, 8, 8] channels_last | {IN_TORCH}
        permute_2 = aten.permute.default(convolution, [0, 2, 3, 1])  # bf16[2, 8, 8, 4]
        relu = aten.relu.default(permute_2)  # bf16[2, 8, 8, 4]
        permute_3 = aten.permute.default(relu, [0, 3, 1, 2])  # bf16[2, 4, 8, 8] channels_last
        convolution_1 = aten.convolution.default(permute_3, _to_copy_2, {PADDED})
            # bf16[2, 4, 8, 8] channels_last | {IN_TORCH}
        clone_1 = aten.clone.default(convolution_1, memory_format=torch.contiguous_format)  # bf16[2, 4, 8, 8]
        permute_4 = aten.permute.default(convolution_1, [0, 2, 3, 1])  # bf16[2, 8, 8, 4]
        return clone_1
        """,
        tolerance=TOLERANCES[torch.bfloat16],
    )


def test_pools_run_in_torch_and_keep_the_layout() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        pooled, _ = aten.max_pool2d_with_indices(convolution(x, w), [2, 2], [2, 2])
        return convolution(pooled + 1, v)

    inputs = X, W, SMALL
    assert_permuted(
        function,
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        v_1: f32[8, 8, 1, 1]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        max_pool2d_with_indices = aten.max_pool2d_with_indices.default(convolution, [2, 2], [2, 2])
        getitem = max_pool2d_with_indices[0]  # f32[2, 8, 4, 4]
        getitem_1 = max_pool2d_with_indices[1]  # i64[2, 8, 4, 4]
        add = aten.add.Tensor(getitem, 1)  # f32[2, 8, 4, 4]
        convolution_1 = aten.convolution.default(add, v_1, {PIXELS})  # f32[2, 8, 4, 4]
        return convolution_1
        """,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        v_1: f32[8, 8, 1, 1]
        permute = aten.permute.default(x_1, [0, 2, 3, 1])  # f32[2, 8, 8, 4] strides (256, 8, 1, 64)
        clone = aten.clone.default(permute, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 4]
        permute_1 = aten.permute.default(clone, [0, 3, 1, 2])  # f32[2, 4, 8, 8] channels_last
        clone_1 = aten.clone.default(w_1, memory_format=torch.channels_last)  # f32[8, 4, 3, 3] channels_last | {CHOSEN}
        convolution = aten.convolution.default(permute_1, clone_1, {PADDED})
            # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute_2 = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        max_pool2d_with_indices = aten.max_pool2d_with_indices.default(convolution, [2, 2], [2, 2])
            # channels_last=[0, 1] | chosen="torch's kernel reads channels_last, and ONNX Runtime's does not"
        getitem = max_pool2d_with_indices[0]  # f32[2, 8, 4, 4] channels_last
        permute_3 = aten.permute.default(getitem, [0, 2, 3, 1])  # f32[2, 4, 4, 8]
        getitem_1 = max_pool2d_with_indices[1]  # i64[2, 8, 4, 4] channels_last
        permute_4 = aten.permute.default(getitem_1, [0, 2, 3, 1])  # i64[2, 4, 4, 8]
        add = aten.add.Tensor(permute_3, 1)  # f32[2, 4, 4, 8]
        permute_5 = aten.permute.default(add, [0, 3, 1, 2])  # f32[2, 8, 4, 4] channels_last
        convolution_1 = aten.convolution.default(permute_5, v_1, {PIXELS})  # f32[2, 8, 4, 4] channels_last | {IN_TORCH}
        clone_2 = aten.clone.default(convolution_1, memory_format=torch.contiguous_format)  # f32[2, 8, 4, 4]
        permute_6 = aten.permute.default(convolution_1, [0, 2, 3, 1])  # f32[2, 4, 4, 8]
        return clone_2
        """,
    )


def test_other_readers_of_an_image_read_its_traced_layout() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.relu(convolution(x, w))
        return aten.view(y, [2, 4, -1]).cumsum(-1)

    inputs = X, W
    assert_permuted(
        function,
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        relu = aten.relu.default(convolution)  # f32[2, 8, 8, 8]
        view = aten.view.default(relu, [2, 4, -1])  # f32[2, 4, 128]
        cumsum = aten.cumsum.default(view, -1)  # f32[2, 4, 128]
        return cumsum
        """,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        permute = aten.permute.default(x_1, [0, 2, 3, 1])  # f32[2, 8, 8, 4] strides (256, 8, 1, 64)
        clone = aten.clone.default(permute, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 4]
        permute_1 = aten.permute.default(clone, [0, 3, 1, 2])  # f32[2, 4, 8, 8] channels_last
        clone_1 = aten.clone.default(w_1, memory_format=torch.channels_last)  # f32[8, 4, 3, 3] channels_last | {CHOSEN}
        convolution = aten.convolution.default(permute_1, clone_1, {PADDED})
            # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute_2 = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        relu = aten.relu.default(permute_2)  # f32[2, 8, 8, 8]
        permute_3 = aten.permute.default(relu, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        clone_2 = aten.clone.default(permute_3, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        view = aten.view.default(clone_2, [2, 4, -1])  # f32[2, 4, 128]
        cumsum = aten.cumsum.default(view, -1)  # f32[2, 4, 128]
        return cumsum
        """,
    )


def test_a_program_in_channels_last_is_not_copied() -> None:
    inputs = [one.contiguous(memory_format=torch.channels_last) for one in (X, W, SMALL)]
    assert_permuted(
        lambda x, w, v: convolution(F.relu(convolution(x, w)), v),
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8] channels_last
        w_1: f32[8, 4, 3, 3] channels_last
        v_1: f32[8, 8, 1, 1]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8] channels_last
        relu = aten.relu.default(convolution)  # f32[2, 8, 8, 8] channels_last
        convolution_1 = aten.convolution.default(relu, v_1, {PIXELS})  # f32[2, 8, 8, 8] channels_last
        return convolution_1
        """,
        f"""
        x_1: f32[2, 4, 8, 8] channels_last
        w_1: f32[8, 4, 3, 3] channels_last
        v_1: f32[8, 8, 1, 1]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        relu = aten.relu.default(permute)  # f32[2, 8, 8, 8]
        permute_1 = aten.permute.default(relu, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        convolution_1 = aten.convolution.default(permute_1, v_1, {PIXELS})  # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute_2 = aten.permute.default(convolution_1, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        return convolution_1
        """,
    )


def test_sizes_have_to_be_known() -> None:
    assert_fx_untouched(PermuteImages(), traced(lambda x, w: convolution(x, w), X, W, mode="symbolic"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_types_are_left_alone(dtype: torch.dtype) -> None:
    assert_fx_untouched(PermuteImages(), traced(lambda x, w: convolution(x, w), X.to(dtype), W.to(dtype)))


def test_float32_is_left_alone_without_tf32() -> None:
    backend: Any = torch.backends.cudnn.conv
    before = backend.fp32_precision
    backend.fp32_precision = "ieee"
    try:
        assert_fx_untouched(PermuteImages(), traced(lambda x, w: convolution(x, w), X, W))
    finally:
        backend.fp32_precision = before


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_gradient_of_a_weight_has_the_weights_layout(layout: torch.memory_format) -> None:
    gradient, x, w = random(2, 8, 8, 8), X, W.contiguous(memory_format=layout)

    def function(g: Tensor, x: Tensor, w: Tensor) -> Any:
        given = (g * 2, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        result = aten.convolution_backward(*given)
        return result[0], result[1]

    gm = traced(function, gradient, x, w)
    expected = gm(gradient, x, w)
    assert run_twice(PermuteImages(), gm)
    ours = gm(gradient, x, w)
    assert ours[1].is_contiguous(memory_format=layout)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert ours[0].stride() == function(gradient, x, w)[0].stride()
