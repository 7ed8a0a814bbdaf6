"""Group normalizations in channels_last, which must be as exact as those of contiguous images; parts of a split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from channels_last_graphs import FASTER, IMAGES, WEIGHT, assert_same, conv, converted, traced
from image_graphs import PADDED

from ort_dynamo.fx_testing import assert_fx_rewrites
from ort_dynamo.graph.marks import HALF
from ort_dynamo.passes.fx.torch_graph.convert_to_channels_last import ConvertToChannelsLast
from ort_dynamo.torch_internals.kernels.kernel_layouts import convolves_in_onednn

aten = torch.ops.aten
ORDERED = "memory_format=torch.contiguous_format"
SIZES = 2, 8, 144


def normalized(x: torch.Tensor, groups: int) -> Any:
    return aten.native_group_norm(x, x.new_ones(8), None, *SIZES, groups, 1e-5)


def trained(x: torch.Tensor, w: torch.Tensor, groups: int) -> tuple[torch.Tensor, ...]:
    """Normalize the result of a convolution, and give gradients."""
    image = conv(x, w)
    result, mean, deviation = normalized(image, groups)
    given = (result.exp(), image, mean, deviation, x.new_ones(8), *SIZES, groups, [True, True, True])
    inner, *outer = aten.native_group_norm_backward(*given)
    return result, inner, *outer


def test_the_means_of_groups_are_subtracted_before() -> None:
    gm = traced(lambda x, w: aten.native_group_norm(conv(x, w), None, None, *SIZES, 2, 1e-5)[0].relu(), IMAGES, WEIGHT)
    assert_fx_rewrites(
        ConvertToChannelsLast(),
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        native_group_norm = aten.native_group_norm.default(convolution, None, None, 2, 8, 144, 2, 1e-05)  # chosen
        getitem = native_group_norm[0]  # f32[2, 8, 12, 12] | chosen
        getitem_1 = native_group_norm[1]  # f32[2, 2] | chosen
        getitem_2 = native_group_norm[2]  # f32[2, 2] | chosen
        relu = aten.relu.default(getitem)  # f32[2, 8, 12, 12] | chosen
        return relu
        """,
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        clone = aten.clone.default(x_1, memory_format=torch.channels_last)  # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        mean = aten.mean.dim(convolution, [2, 3], True)  # f32[2, 8, 1, 1] | {FASTER}
        view = aten.view.default(mean, [-1, 2, 4])  # f32[2, 2, 4] | {FASTER}
        mean_1 = aten.mean.dim(view, [2], True)  # f32[2, 2, 1] | {FASTER}
        expand = aten.expand.default(mean_1, [-1, -1, 4])  # f32[2, 2, 4] strides (2, 1, 0) | {FASTER}
        clone_1 = aten.clone.default(expand, {ORDERED})  # f32[2, 2, 4] | {FASTER}
        view_1 = aten.view.default(clone_1, [-1, 8, 1, 1])  # f32[2, 8, 1, 1] | {FASTER}
        sub = aten.sub.Tensor(convolution, view_1)  # f32[2, 8, 12, 12] channels_last | {FASTER}
        native_group_norm = aten.native_group_norm.default(sub, None, None, 2, 8, 144, 2, 1e-05)  # chosen
        getitem = native_group_norm[0]  # f32[2, 8, 12, 12] channels_last | chosen
        getitem_1 = native_group_norm[1]  # f32[2, 2] | chosen
        getitem_2 = native_group_norm[2]  # f32[2, 2] | chosen
        relu = aten.relu.default(getitem)  # f32[2, 8, 12, 12] channels_last | chosen
        clone_2 = aten.clone.default(relu, {ORDERED})  # f32[2, 8, 12, 12] | {FASTER}
        return clone_2
        """,
        gm,
        run=False,
    )


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_results_and_gradients_are_the_same(groups: int, mode: str) -> None:
    gm, modified = converted(lambda x, w: trained(x, w, groups), IMAGES, WEIGHT, mode=mode)
    assert modified
    (norm,) = gm.graph.find_nodes(op="call_function", target=aten.native_group_norm.default)
    (gradient,) = gm.graph.find_nodes(op="call_function", target=aten.native_group_norm_backward.default)
    assert norm.args[0].target is gradient.args[1].target is aten.sub.Tensor


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("offset", [0.0, 10.0, 1e4])
def test_a_mean_larger_than_the_deviation_costs_no_more_digits_than_in_eager(offset: float, groups: int) -> None:
    weight = torch.zeros_like(WEIGHT)
    weight[range(8), range(8), 1, 1] = 1  # the convolution returns its images
    images = IMAGES + offset
    gm = traced(lambda x, w: normalized(conv(x, w), groups)[0], images, weight)
    assert ConvertToChannelsLast()(gm).modified
    truth = normalized(images.double(), groups)[0]
    theirs = (normalized(images, groups)[0] - truth).abs().max()
    ours = (gm(images, weight) - truth).abs().max()
    assert ours <= theirs + 4 * torch.finfo(torch.float32).eps * truth.abs().max()


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_mean_that_others_read_is_that_of_the_image(groups: int) -> None:
    gm, modified = converted(lambda x, w: normalized(conv(x, w) + 3, groups), IMAGES, WEIGHT)
    assert modified
    assert gm.graph.find_nodes(op="call_function", target=aten.sub.Tensor)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_gradients_of_another_image_and_in_another_layout(mode: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        image = conv(x, w)
        result, mean, deviation = normalized(image, 2)
        given = (mean, deviation, None, *SIZES, 2, [True, False, False])
        images = image * 2, image, image.cumsum(2)
        return result, mean, *(aten.native_group_norm_backward(x.cumsum(3), one, *given)[0] for one in images)

    gm, modified = converted(function, IMAGES, WEIGHT, mode=mode)
    assert modified
    gradients = gm.graph.find_nodes(op="call_function", target=aten.native_group_norm_backward.default)
    assert [one.args[1].target is aten.sub.Tensor for one in gradients] == [False, True, False]


def test_a_backward_that_reads_the_image_computes_the_difference_again() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        image, scale = conv(x, w), x.new_ones(8)
        first, second = normalized(image, 2), normalized(image, 8)
        return first[0], *(
            aten.native_group_norm_backward(one[0], image, *one[1:], scale, *SIZES, groups, [True, True, True])[0]
            for one, groups in ((first, 2), (second, 8))
        )

    gm = traced(function, IMAGES, WEIGHT)
    gradients = gm.graph.find_nodes(op="call_function", target=aten.native_group_norm_backward.default)
    for node in gradients:
        node.meta[HALF] = "is_backward"
    assert ConvertToChannelsLast()(gm).modified
    assert_same(gm, function, IMAGES, WEIGHT)
    differences = gm.graph.find_nodes(op="call_function", target=aten.sub.Tensor)
    assert [one.meta.get(HALF) for one in differences] == [None, None, "is_backward", "is_backward"]
    assert [one.args[1] for one in gradients] == differences[2:]


@pytest.mark.parametrize("count", [1, 4, 16])
def test_memory_that_is_read_as_other_images_is_left_as_it_was_traced(count: int) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        image, sizes = conv(x, w), (count, 16 // count, 144, 1)
        result, mean, deviation = aten.native_group_norm(image, None, None, *sizes, 1e-5)
        given = (result, image, mean, deviation, None, *sizes, [True, False, False])
        return result, mean, aten.native_group_norm_backward(*given)[0]

    gm, modified = converted(function, IMAGES, WEIGHT)
    assert modified
    assert not gm.graph.find_nodes(op="call_function", target=aten.sub.Tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_are_normalized_as_they_were_traced(dtype: torch.dtype) -> None:
    if not convolves_in_onednn(dtype):
        pytest.skip("the pass leaves such a convolution as it was traced on this processor")
    gm, modified = converted(lambda x, w: normalized(conv(x, w), 2)[0], IMAGES.to(dtype), WEIGHT.to(dtype))
    assert modified
    assert not gm.graph.find_nodes(op="call_function", target=aten.sub.Tensor)


def test_parts_of_a_split_become_slices() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        one, other = conv(x, w).chunk(2, 1)
        return one * other

    gm = traced(function, IMAGES, WEIGHT)
    gaps = "f32[2, 4, 12, 12] strides (1152, 144, 12, 1)"
    assert_fx_rewrites(
        ConvertToChannelsLast(),
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 12, 12] | chosen
        split = aten.split.Tensor(convolution, 4, 1)  # chosen
        getitem = split[0]  # {gaps} | chosen
        getitem_1 = split[1]  # {gaps} | chosen
        mul = aten.mul.Tensor(getitem, getitem_1)  # f32[2, 4, 12, 12] | chosen
        return mul
        """,
        f"""
        x_1: f32[2, 8, 12, 12]
        w_1: f32[8, 8, 3, 3]
        clone = aten.clone.default(x_1, memory_format=torch.channels_last)  # f32[2, 8, 12, 12] channels_last | {FASTER}
        convolution = aten.convolution.default(clone, w_1, {PADDED})  # f32[2, 8, 12, 12] channels_last | chosen
        slice = aten.slice.Tensor(convolution, 1, 0, 4)  # f32[2, 4, 12, 12] strides (1152, 1, 96, 8) | chosen
        slice_1 = aten.slice.Tensor(convolution, 1, 4, 8)  # f32[2, 4, 12, 12] strides (1152, 1, 96, 8) | chosen
        clone_1 = aten.clone.default(slice, memory_format=torch.channels_last)
            # f32[2, 4, 12, 12] channels_last | {FASTER}
        clone_2 = aten.clone.default(slice_1, memory_format=torch.channels_last)
            # f32[2, 4, 12, 12] channels_last | {FASTER}
        mul = aten.mul.Tensor(clone_1, clone_2)  # f32[2, 4, 12, 12] channels_last | chosen
        clone_3 = aten.clone.default(mul, {ORDERED})  # f32[2, 4, 12, 12] | {FASTER}
        return clone_3
        """,
        gm,
        run=False,
    )
    assert_same(gm, function, IMAGES, WEIGHT)
