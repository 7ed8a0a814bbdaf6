"""Views of images between convolutions are views in their layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from image_graphs import CHOSEN, IN_TORCH, PADDED, PIXELS, SMALL, W, X, assert_permuted, convolution, random
from torch import Tensor

from ort_dynamo.torch_internals.kernels.operators import aten


def test_a_programs_own_permutations_cost_nothing() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = convolution(x, w).permute(0, 2, 3, 1)
        return convolution(convolution(x, w) + F.layer_norm(y, (8,)).permute(0, 3, 1, 2), v)

    inputs = X, W, SMALL
    assert_permuted(
        function,
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        v_1: f32[8, 8, 1, 1]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        permute = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8] strides (512, 8, 1, 64)
        convolution_1 = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        native_layer_norm = aten.native_layer_norm.default(permute, [8], None, None, 1e-05)
        getitem = native_layer_norm[0]  # f32[2, 8, 8, 8]
        getitem_1 = native_layer_norm[1]  # f32[2, 8, 8, 1]
        getitem_2 = native_layer_norm[2]  # f32[2, 8, 8, 1]
        permute_1 = aten.permute.default(getitem, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        add = aten.add.Tensor(convolution_1, permute_1)  # f32[2, 8, 8, 8]
        convolution_2 = aten.convolution.default(add, v_1, {PIXELS})  # f32[2, 8, 8, 8]
        return convolution_2
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
        alias = aten.alias.default(permute_2)  # f32[2, 8, 8, 8]
        convolution_1 = aten.convolution.default(permute_1, clone_1, {PADDED})
            # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute_3 = aten.permute.default(convolution_1, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        native_layer_norm = aten.native_layer_norm.default(alias, [8], None, None, 1e-05)
        getitem = native_layer_norm[0]  # f32[2, 8, 8, 8]
        getitem_1 = native_layer_norm[1]  # f32[2, 8, 8, 1]
        getitem_2 = native_layer_norm[2]  # f32[2, 8, 8, 1]
        permute_4 = aten.permute.default(getitem, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        add = aten.add.Tensor(permute_3, getitem)  # f32[2, 8, 8, 8]
        permute_5 = aten.permute.default(add, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        convolution_2 = aten.convolution.default(permute_5, v_1, {PIXELS})  # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        clone_2 = aten.clone.default(convolution_2, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        permute_6 = aten.permute.default(convolution_2, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        return clone_2
        """,
    )


def test_tokens_of_patches_cost_nothing() -> None:
    inputs = X, W
    assert_permuted(
        lambda x, w: F.layer_norm(convolution(x, w).flatten(2).transpose(1, 2), (8,)),
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        view = aten.view.default(convolution, [2, 8, 64])  # f32[2, 8, 64]
        transpose = aten.transpose.int(view, 1, 2)  # f32[2, 64, 8] strides (512, 1, 64)
        native_layer_norm = aten.native_layer_norm.default(transpose, [8], None, None, 1e-05)
        getitem = native_layer_norm[0]  # f32[2, 64, 8]
        getitem_1 = native_layer_norm[1]  # f32[2, 64, 1]
        getitem_2 = native_layer_norm[2]  # f32[2, 64, 1]
        return getitem
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
        view = aten.view.default(permute_2, [2, 64, 8])  # f32[2, 64, 8]
        alias = aten.alias.default(view)  # f32[2, 64, 8]
        native_layer_norm = aten.native_layer_norm.default(alias, [8], None, None, 1e-05)
        getitem = native_layer_norm[0]  # f32[2, 64, 8]
        getitem_1 = native_layer_norm[1]  # f32[2, 64, 1]
        getitem_2 = native_layer_norm[2]  # f32[2, 64, 1]
        return getitem
        """,
    )


def test_the_gradient_of_a_mean_has_its_channels_last() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Tensor:
        mean = g.expand(2, 8, 8, 8) / 64
        return convolution(mean * F.relu(convolution(x, w)), v)

    inputs = X, W, SMALL, random(2, 8, 1, 1)
    assert_permuted(
        function,
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        v_1: f32[8, 8, 1, 1]
        g_1: f32[2, 8, 1, 1]
        expand = aten.expand.default(g_1, [2, 8, 8, 8])  # f32[2, 8, 8, 8] strides (8, 1, 0, 0)
        div = aten.div.Tensor(expand, 64)  # f32[2, 8, 8, 8]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        relu = aten.relu.default(convolution)  # f32[2, 8, 8, 8]
        mul = aten.mul.Tensor(div, relu)  # f32[2, 8, 8, 8]
        convolution_1 = aten.convolution.default(mul, v_1, {PIXELS})  # f32[2, 8, 8, 8]
        return convolution_1
        """,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        v_1: f32[8, 8, 1, 1]
        g_1: f32[2, 8, 1, 1]
        view = aten.view.default(g_1, [2, 1, 1, 8])  # f32[2, 1, 1, 8]
        expand = aten.expand.default(view, [2, 8, 8, 8])  # f32[2, 8, 8, 8] strides (8, 0, 0, 1)
        div = aten.div.Tensor(expand, 64)  # f32[2, 8, 8, 8]
        permute = aten.permute.default(x_1, [0, 2, 3, 1])  # f32[2, 8, 8, 4] strides (256, 8, 1, 64)
        clone = aten.clone.default(permute, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 4]
        permute_1 = aten.permute.default(clone, [0, 3, 1, 2])  # f32[2, 4, 8, 8] channels_last
        clone_1 = aten.clone.default(w_1, memory_format=torch.channels_last)  # f32[8, 4, 3, 3] channels_last | {CHOSEN}
        convolution = aten.convolution.default(permute_1, clone_1, {PADDED})
            # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute_2 = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        relu = aten.relu.default(permute_2)  # f32[2, 8, 8, 8]
        mul = aten.mul.Tensor(div, relu)  # f32[2, 8, 8, 8]
        permute_3 = aten.permute.default(mul, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        convolution_1 = aten.convolution.default(permute_3, v_1, {PIXELS})  # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        clone_2 = aten.clone.default(convolution_1, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        permute_4 = aten.permute.default(convolution_1, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        return clone_2
        """,
    )


def test_an_expanded_image_is_convolved() -> None:
    inputs = random(2, 8, 1, 1), random(4, 8, 3, 3)
    assert_permuted(
        lambda g, w: convolution(g.expand(2, 8, 8, 8), w),
        inputs,
        f"""
        g_1: f32[2, 8, 1, 1]
        w_1: f32[4, 8, 3, 3]
        expand = aten.expand.default(g_1, [2, 8, 8, 8])  # f32[2, 8, 8, 8] strides (8, 1, 0, 0)
        convolution = aten.convolution.default(expand, w_1, {PADDED})  # f32[2, 4, 8, 8]
        return convolution
        """,
        f"""
        g_1: f32[2, 8, 1, 1]
        w_1: f32[4, 8, 3, 3]
        view = aten.view.default(g_1, [2, 1, 1, 8])  # f32[2, 1, 1, 8]
        expand = aten.expand.default(view, [2, 8, 8, 8])  # f32[2, 8, 8, 8] strides (8, 0, 0, 1)
        clone = aten.clone.default(expand, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        permute = aten.permute.default(clone, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        clone_1 = aten.clone.default(w_1, memory_format=torch.channels_last)  # f32[4, 8, 3, 3] channels_last | {CHOSEN}
        convolution = aten.convolution.default(permute, clone_1, {PADDED})
            # f32[2, 4, 8, 8] channels_last | {IN_TORCH}
        clone_2 = aten.clone.default(convolution, memory_format=torch.contiguous_format)  # f32[2, 4, 8, 8]
        permute_1 = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 4]
        return clone_2
        """,
    )


def test_views_of_rewritten_operators_stay_valid() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = torch.exp(convolution(x, w).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # in memory as the convolution is
        return aten.view(y, [2, -1]) + aten.view(convolution(y, v), [2, -1])

    inputs = X, W, SMALL
    assert_permuted(
        function,
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        v_1: f32[8, 8, 1, 1]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        permute = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8] strides (512, 8, 1, 64)
        exp = aten.exp.default(permute)  # f32[2, 8, 8, 8] strides (512, 8, 1, 64)
        permute_1 = aten.permute.default(exp, [0, 3, 1, 2])  # f32[2, 8, 8, 8]
        view = aten.view.default(permute_1, [2, -1])  # f32[2, 512]
        convolution_1 = aten.convolution.default(permute_1, v_1, {PIXELS})  # f32[2, 8, 8, 8]
        view_1 = aten.view.default(convolution_1, [2, -1])  # f32[2, 512]
        add = aten.add.Tensor(view, view_1)  # f32[2, 512]
        return add
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
        alias = aten.alias.default(permute_2)  # f32[2, 8, 8, 8]
        exp = aten.exp.default(alias)  # f32[2, 8, 8, 8]
        permute_3 = aten.permute.default(exp, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        clone_2 = aten.clone.default(permute_3, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        view = aten.view.default(clone_2, [2, -1])  # f32[2, 512]
        convolution_1 = aten.convolution.default(permute_3, v_1, {PIXELS})  # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute_4 = aten.permute.default(convolution_1, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        clone_3 = aten.clone.default(convolution_1, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        view_1 = aten.view.default(clone_3, [2, -1])  # f32[2, 512]
        add = aten.add.Tensor(view, view_1)  # f32[2, 512]
        return add
        """,
    )


def test_joined_and_sliced_channels_stay_last() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = convolution(x, w)
        return convolution(torch.cat([y[:, 4:], y[:, :4]], 1) * y.mean((2, 3), keepdim=True), v)

    inputs = X, W, SMALL
    assert_permuted(
        function,
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        v_1: f32[8, 8, 1, 1]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        slice = aten.slice.Tensor(convolution, 1, 4, 9223372036854775807)  # f32[2, 4, 8, 8] strides (512, 64, 8, 1)
        slice_1 = aten.slice.Tensor(convolution, 1, 0, 4)  # f32[2, 4, 8, 8] strides (512, 64, 8, 1)
        cat = aten.cat.default([slice, slice_1], 1)  # f32[2, 8, 8, 8]
        mean = aten.mean.dim(convolution, [2, 3], True)  # f32[2, 8, 1, 1]
        mul = aten.mul.Tensor(cat, mean)  # f32[2, 8, 8, 8]
        convolution_1 = aten.convolution.default(mul, v_1, {PIXELS})  # f32[2, 8, 8, 8]
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
        slice = aten.slice.Tensor(permute_2, 3, 4, 9223372036854775807)  # f32[2, 8, 8, 4] strides (512, 64, 8, 1)
        slice_1 = aten.slice.Tensor(permute_2, 3, 0, 4)  # f32[2, 8, 8, 4] strides (512, 64, 8, 1)
        cat = aten.cat.default([slice, slice_1], 3)  # f32[2, 8, 8, 8]
        mean = aten.mean.dim(permute_2, [1, 2], True)  # f32[2, 1, 1, 8]
        mul = aten.mul.Tensor(cat, mean)  # f32[2, 8, 8, 8]
        permute_3 = aten.permute.default(mul, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        convolution_1 = aten.convolution.default(permute_3, v_1, {PIXELS})  # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        clone_2 = aten.clone.default(convolution_1, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        permute_4 = aten.permute.default(convolution_1, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        return clone_2
        """,
    )


def test_results_share_memory_as_they_did() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        y = convolution(x, w)
        return y, y[..., :-1], y.permute(0, 2, 3, 1), F.relu(y)

    inputs = X, W
    gm = assert_permuted(
        function,
        inputs,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        slice = aten.slice.Tensor(convolution, 3, 0, -1)  # f32[2, 8, 8, 7] strides (512, 64, 8, 1)
        permute = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8] strides (512, 8, 1, 64)
        relu = aten.relu.default(convolution)  # f32[2, 8, 8, 8]
        return (convolution, slice, permute, relu)
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
        clone_2 = aten.clone.default(convolution, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        permute_2 = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        slice = aten.slice.Tensor(permute_2, 2, 0, -1)  # f32[2, 8, 7, 8] strides (512, 64, 8, 1)
        slice_1 = aten.slice.Tensor(clone_2, 3, 0, -1)  # f32[2, 8, 8, 7] strides (512, 64, 8, 1)
        alias = aten.alias.default(permute_2)  # f32[2, 8, 8, 8]
        permute_3 = aten.permute.default(clone_2, [0, 2, 3, 1])  # f32[2, 8, 8, 8] strides (512, 8, 1, 64)
        relu = aten.relu.default(permute_2)  # f32[2, 8, 8, 8]
        permute_4 = aten.permute.default(relu, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        clone_3 = aten.clone.default(permute_4, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        return (clone_2, slice_1, permute_3, clone_3)
        """,
    )
    whole, part, permuted, other = gm(X, W)
    assert whole.is_contiguous()
    assert part.data_ptr() == whole.data_ptr() == permuted.data_ptr() != other.data_ptr()
