"""Tests of channels_last propagation: which images get it, and where they are copied there and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from channels_last_graphs import FASTER, IMAGES, WEIGHT, assert_same, block, conv, traced
from image_graphs import PADDED

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.graph.marks import HALF
from ort_dynamo.passes.fx.torch_graph.convert_to_channels_last import ConvertToChannelsLast

GRADIENT = f"[0], {PADDED.removeprefix('None, ')}, [True, True, False]"
"""The arguments of a convolution's gradient."""


def test_operators_after_a_convolution_take_its_layout_up_to_the_output() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        return conv(x, w).relu() + 1

    gm = traced(function, IMAGES, WEIGHT)
    assert_fx_rewrites(
        ConvertToChannelsLast(),
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        relu = aten.relu.default(convolution)  # f32[2, 8, 12, 12] | chosen
        add = aten.add.Tensor(relu, 1)  # f32[2, 8, 12, 12] | chosen
        return add
        """,
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        clone = aten.clone.default(x_1, memory_format=torch.channels_last)  # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        relu = aten.relu.default(convolution)  # f32[2, 8, 12, 12] channels_last | chosen
        add = aten.add.Tensor(relu, 1)  # f32[2, 8, 12, 12] channels_last | chosen
        clone_1 = aten.clone.default(add, memory_format=torch.contiguous_format)  # f32[2, 8, 12, 12] | {FASTER}
        return clone_1
        """,
        gm,
        run=False,
    )
    assert_same(gm, function, IMAGES, WEIGHT)


def test_two_convolutions_of_one_tensor_share_its_copy() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        return conv(conv(x, w), w) + conv(x, w)

    gm = traced(function, IMAGES, WEIGHT)
    assert_fx_rewrites(
        ConvertToChannelsLast(),
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        convolution_1 = aten.convolution.default(convolution, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        convolution_2 = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        add = aten.add.Tensor(convolution_1, convolution_2)  # f32[2, 8, 12, 12] | chosen
        return add
        """,
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        clone = aten.clone.default(x_1, memory_format=torch.channels_last)  # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        convolution_1 = aten.convolution.default(convolution, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        convolution_2 = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        add = aten.add.Tensor(convolution_1, convolution_2)  # f32[2, 8, 12, 12] channels_last | chosen
        clone_1 = aten.clone.default(add, memory_format=torch.contiguous_format)  # f32[2, 8, 12, 12] | {FASTER}
        return clone_1
        """,
        gm,
        run=False,
    )
    assert_same(gm, function, IMAGES, WEIGHT)


def test_an_unknown_operator_reads_its_traced_layout() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        return conv(x, w).view(2, -1).cumsum(1), conv(x, w).relu()

    gm = traced(function, IMAGES, WEIGHT)
    assert_fx_rewrites(
        ConvertToChannelsLast(),
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        view = aten.view.default(convolution, [2, -1])  # f32[2, 1152] | chosen
        cumsum = aten.cumsum.default(view, 1)  # f32[2, 1152] | chosen
        convolution_1 = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        relu = aten.relu.default(convolution_1)  # f32[2, 8, 12, 12] | chosen
        return (cumsum, relu)
        """,
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        clone = aten.clone.default(x_1, memory_format=torch.channels_last)  # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        clone_1 = aten.clone.default(convolution, memory_format=torch.contiguous_format)  # f32[2, 8, 12, 12] | {FASTER}
        view = aten.view.default(clone_1, [2, -1])  # f32[2, 1152] | chosen
        cumsum = aten.cumsum.default(view, 1)  # f32[2, 1152] | chosen
        convolution_1 = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        relu = aten.relu.default(convolution_1)  # f32[2, 8, 12, 12] channels_last | chosen
        clone_2 = aten.clone.default(relu, memory_format=torch.contiguous_format)  # f32[2, 8, 12, 12] | {FASTER}
        return (cumsum, clone_2)
        """,
        gm,
        run=False,
    )
    assert_same(gm, function, IMAGES, WEIGHT)


def test_views_of_a_layout_are_views_in_it() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        both = torch.cat([conv(x, w), x], 1)
        return conv(torch.ops.aten.alias(both[:, :8]), w), both[:, 8:].cumsum(1)

    gm = traced(function, IMAGES, WEIGHT)
    assert_fx_rewrites(
        ConvertToChannelsLast(),
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        cat = aten.cat.default([convolution, x_1], 1)  # f32[2, 16, 12, 12] | chosen
        slice = aten.slice.Tensor(cat, 1, 0, 8)  # f32[2, 8, 12, 12] strides (2304, 144, 12, 1) | chosen
        alias = aten.alias.default(slice)  # f32[2, 8, 12, 12] strides (2304, 144, 12, 1) | chosen
        convolution_1 = aten.convolution.default(alias, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        slice_1 = aten.slice.Tensor(cat, 1, 8, 9223372036854775807)
            # f32[2, 8, 12, 12] strides (2304, 144, 12, 1) | chosen
        cumsum = aten.cumsum.default(slice_1, 1)  # f32[2, 8, 12, 12] | chosen
        return (convolution_1, cumsum)
        """,
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        clone = aten.clone.default(x_1, memory_format=torch.channels_last)  # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        cat = aten.cat.default([convolution, clone], 1)  # f32[2, 16, 12, 12] channels_last | chosen
        slice = aten.slice.Tensor(cat, 1, 0, 8)  # f32[2, 8, 12, 12] strides (2304, 1, 192, 16) | chosen
        alias = aten.alias.default(slice)  # f32[2, 8, 12, 12] strides (2304, 1, 192, 16) | chosen
        clone_1 = aten.clone.default(cat, memory_format=torch.contiguous_format)  # f32[2, 16, 12, 12] | {FASTER}
        slice_1 = aten.slice.Tensor(clone_1, 1, 0, 8)  # f32[2, 8, 12, 12] strides (2304, 144, 12, 1) | {FASTER}
        alias_1 = aten.alias.default(slice_1)  # f32[2, 8, 12, 12] strides (2304, 144, 12, 1) | {FASTER}
        convolution_1 = aten.convolution.default(alias_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        slice_2 = aten.slice.Tensor(cat, 1, 8, 9223372036854775807)
            # f32[2, 8, 12, 12] strides (2304, 1, 192, 16) | chosen
        slice_3 = aten.slice.Tensor(clone_1, 1, 8, 9223372036854775807)
            # f32[2, 8, 12, 12] strides (2304, 144, 12, 1) | {FASTER}
        cumsum = aten.cumsum.default(slice_3, 1)  # f32[2, 8, 12, 12] | chosen
        return (convolution_1, cumsum)
        """,
        gm,
        run=False,
    )
    assert_same(gm, function, IMAGES, WEIGHT)


def test_channels_that_are_the_last_dimension_in_between_are_not_moved_there() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        return block(conv(x, w), w, scale, inside)

    inputs = (IMAGES, WEIGHT, torch.randn(8), torch.randn(8, 8))
    gm = traced(function, *inputs)
    assert_fx_rewrites(
        ConvertToChannelsLast(),
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        scale_1: f32[8]
        inside_1: f32[8, 8]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        convolution_1 = aten.convolution.default(convolution, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        permute = aten.permute.default(convolution_1, [0, 2, 3, 1])
            # f32[2, 12, 12, 8] strides (1152, 12, 1, 144) | chosen
        native_layer_norm = aten.native_layer_norm.default(permute, [8], None, None, 1e-05)  # chosen
        getitem = native_layer_norm[0]  # f32[2, 12, 12, 8] | chosen
        getitem_1 = native_layer_norm[1]  # f32[2, 12, 12, 1] | chosen
        getitem_2 = native_layer_norm[2]  # f32[2, 12, 12, 1] | chosen
        t = aten.t.default(inside_1)  # f32[8, 8] strides (1, 8) | chosen
        view = aten.view.default(getitem, [288, 8])  # f32[288, 8] | chosen
        mm = aten.mm.default(view, t)  # f32[288, 8] | chosen
        _unsafe_view = aten._unsafe_view.default(mm, [2, 12, 12, 8])  # f32[2, 12, 12, 8] | chosen
        mul = aten.mul.Tensor(_unsafe_view, scale_1)  # f32[2, 12, 12, 8] | chosen
        permute_1 = aten.permute.default(mul, [0, 3, 1, 2])  # f32[2, 8, 12, 12] channels_last | chosen
        add = aten.add.Tensor(convolution, permute_1)  # f32[2, 8, 12, 12] | chosen
        return add
        """,
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        scale_1: f32[8]
        inside_1: f32[8, 8]
        clone = aten.clone.default(x_1, memory_format=torch.channels_last)  # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        convolution_1 = aten.convolution.default(convolution, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        permute = aten.permute.default(convolution_1, [0, 2, 3, 1])  # f32[2, 12, 12, 8] | chosen
        native_layer_norm = aten.native_layer_norm.default(permute, [8], None, None, 1e-05)  # chosen
        getitem = native_layer_norm[0]  # f32[2, 12, 12, 8] | chosen
        getitem_1 = native_layer_norm[1]  # f32[2, 12, 12, 1] | chosen
        getitem_2 = native_layer_norm[2]  # f32[2, 12, 12, 1] | chosen
        t = aten.t.default(inside_1)  # f32[8, 8] strides (1, 8) | chosen
        view = aten.view.default(getitem, [288, 8])  # f32[288, 8] | chosen
        mm = aten.mm.default(view, t)  # f32[288, 8] | chosen
        _unsafe_view = aten._unsafe_view.default(mm, [2, 12, 12, 8])  # f32[2, 12, 12, 8] | chosen
        mul = aten.mul.Tensor(_unsafe_view, scale_1)  # f32[2, 12, 12, 8] | chosen
        permute_1 = aten.permute.default(mul, [0, 3, 1, 2])  # f32[2, 8, 12, 12] channels_last | chosen
        add = aten.add.Tensor(convolution, permute_1)  # f32[2, 8, 12, 12] channels_last | chosen
        clone_1 = aten.clone.default(add, memory_format=torch.contiguous_format)  # f32[2, 8, 12, 12] | {FASTER}
        return clone_1
        """,
        gm,
        run=False,
    )
    assert_same(gm, function, *inputs)


def test_contiguous_becomes_an_alias_of_a_contiguous_tensor() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return conv(x, w).permute(0, 2, 3, 1).contiguous().view(-1, 8).cumsum(0)

    gm = traced(function, IMAGES, WEIGHT)
    assert_fx_rewrites(
        ConvertToChannelsLast(),
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        permute = aten.permute.default(convolution, [0, 2, 3, 1])
            # f32[2, 12, 12, 8] strides (1152, 12, 1, 144) | chosen
        clone = aten.clone.default(permute, memory_format=torch.contiguous_format)  # f32[2, 12, 12, 8] | chosen
        view = aten.view.default(clone, [-1, 8])  # f32[288, 8] | chosen
        cumsum = aten.cumsum.default(view, 0)  # f32[288, 8] | chosen
        return cumsum
        """,
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        clone = aten.clone.default(x_1, memory_format=torch.channels_last)  # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        permute = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 12, 12, 8] | chosen
        alias = aten.alias.default(permute)  # f32[2, 12, 12, 8] | chosen
        view = aten.view.default(alias, [-1, 8])  # f32[288, 8] | chosen
        cumsum = aten.cumsum.default(view, 0)  # f32[288, 8] | chosen
        return cumsum
        """,
        gm,
        run=False,
    )
    assert_same(gm, function, IMAGES, WEIGHT)


def test_a_transpose_of_image_sides_is_made_contiguous_once() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        return conv(conv(x, w).permute(0, 1, 3, 2), w)

    gm = traced(function, IMAGES, WEIGHT)
    assert_fx_rewrites(
        ConvertToChannelsLast(),
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        permute = aten.permute.default(convolution, [0, 1, 3, 2])
            # f32[2, 8, 12, 12] strides (1152, 144, 1, 12) | chosen
        convolution_1 = aten.convolution.default(permute, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        return convolution_1
        """,
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        clone = aten.clone.default(x_1, memory_format=torch.channels_last)  # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        permute = aten.permute.default(convolution, [0, 1, 3, 2])  # f32[2, 8, 12, 12] strides (1152, 1, 8, 96) | chosen
        clone_1 = aten.clone.default(permute, memory_format=torch.channels_last)
            # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution_1 = aten.convolution.default(clone_1, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        clone_2 = aten.clone.default(convolution_1, memory_format=torch.contiguous_format)
            # f32[2, 8, 12, 12] | {FASTER}
        return clone_2
        """,
        gm,
        run=False,
    )
    assert_same(gm, function, IMAGES, WEIGHT)


UNTOUCHED = {
    "a weight larger than its images": (torch.randn(1, 8, 4, 4), WEIGHT),
    "images in channels_last": (IMAGES.to(memory_format=torch.channels_last), WEIGHT),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_graphs_without_a_gain_are_not_copied(name: str) -> None:
    assert_fx_untouched(ConvertToChannelsLast(), traced(lambda x, w: conv(x, w).relu(), *UNTOUCHED[name]))


def test_a_graph_that_sessions_share_stays_as_it_is() -> None:
    assert_fx_untouched(ConvertToChannelsLast(), traced(lambda x, w: conv(x, w).relu(), IMAGES, WEIGHT, chosen=False))


def test_one_dimension_stays_as_it_is() -> None:
    inputs = torch.randn(2, 8, 40), torch.randn(8, 8, 3)
    assert_fx_untouched(ConvertToChannelsLast(), traced(lambda x, w: F.conv1d(x, w).relu(), *inputs))


def test_the_gradient_of_a_mean_is_divided_before_it_is_expanded() -> None:
    def function(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        given = (g.expand(2, 8, 12, 12) / 144, x, w, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return torch.ops.aten.convolution_backward(*given, [True, True, False])[:2]

    inputs = torch.randn(2, 8, 1, 1), IMAGES, WEIGHT
    gm = traced(function, *inputs)
    assert_fx_rewrites(
        ConvertToChannelsLast(),
        f"""
        g_1: f32[2, 8, 1, 1]
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        expand = aten.expand.default(g_1, [2, 8, 12, 12])  # f32[2, 8, 12, 12] strides (8, 1, 0, 0) | chosen
        div = aten.div.Tensor(expand, 144)  # f32[2, 8, 12, 12] | chosen
        convolution_backward = aten.convolution_backward.default(div, x_1, w_1, {GRADIENT})  # chosen
        getitem = convolution_backward[0]  # f32[2, 8, 12, 12] | chosen
        getitem_1 = convolution_backward[1]  # f32[8, 8, 3, 3] | chosen
        getitem_2 = convolution_backward[2]  # chosen
        return (getitem, getitem_1)
        """,
        f"""
        g_1: f32[2, 8, 1, 1]
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        expand = aten.expand.default(g_1, [2, 8, 12, 12])  # f32[2, 8, 12, 12] strides (8, 1, 0, 0) | chosen
        div = aten.div.Tensor(g_1, 144)  # f32[2, 8, 1, 1] | {FASTER}
        expand_1 = aten.expand.default(div, [2, 8, 12, 12])  # f32[2, 8, 12, 12] strides (8, 1, 0, 0) | {FASTER}
        clone = aten.clone.default(expand_1, memory_format=torch.channels_last)
            # f32[2, 8, 12, 12] channels_last | {FASTER}
        clone_1 = aten.clone.default(x_1, memory_format=torch.channels_last)
            # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution_backward = aten.convolution_backward.default(clone, clone_1, w_1, {GRADIENT})  # chosen
        getitem = convolution_backward[0]  # f32[2, 8, 12, 12] channels_last | chosen
        clone_2 = aten.clone.default(getitem, memory_format=torch.contiguous_format)  # f32[2, 8, 12, 12] | {FASTER}
        getitem_1 = convolution_backward[1]  # f32[8, 8, 3, 3] channels_last | chosen
        contiguous = aten.contiguous.default(getitem_1)  # f32[8, 8, 3, 3] | {FASTER}
        getitem_2 = convolution_backward[2]  # chosen
        return (clone_2, contiguous)
        """,
        gm,
        run=False,
    )
    assert_same(gm, function, *inputs)


def test_division_moved_before_its_expand_stays_in_the_forward() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return conv(x.sum((2, 3), keepdim=True).expand(2, 8, 12, 12) / 2, w)

    gm = traced(function, IMAGES, WEIGHT)
    (total,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    total.meta[HALF] = "is_forward"
    assert_fx_rewrites(
        ConvertToChannelsLast(),
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        sum = aten.sum.dim_IntList(x_1, [2, 3], True)  # f32[2, 8, 1, 1] | chosen
        expand = aten.expand.default(sum, [2, 8, 12, 12])  # f32[2, 8, 12, 12] strides (8, 1, 0, 0) | chosen
        div = aten.div.Tensor(expand, 2)  # f32[2, 8, 12, 12] | chosen
        convolution = aten.convolution.default(div, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        return convolution
        """,
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        sum = aten.sum.dim_IntList(x_1, [2, 3], True)  # f32[2, 8, 1, 1] | chosen
        expand = aten.expand.default(sum, [2, 8, 12, 12])  # f32[2, 8, 12, 12] strides (8, 1, 0, 0) | chosen
        div = aten.div.Tensor(sum, 2)  # f32[2, 8, 1, 1] | {FASTER}
        expand_1 = aten.expand.default(div, [2, 8, 12, 12])  # f32[2, 8, 12, 12] strides (8, 1, 0, 0) | {FASTER}
        clone = aten.clone.default(expand_1, memory_format=torch.channels_last)
            # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        clone_1 = aten.clone.default(convolution, memory_format=torch.contiguous_format)  # f32[2, 8, 12, 12] | {FASTER}
        return clone_1
        """,
        gm,
        run=False,
    )
    assert [node.target for node in gm.graph.nodes if HALF in node.meta] == [torch.ops.aten.sum.dim_IntList]
