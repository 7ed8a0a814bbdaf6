"""Instance normalizations by sums, in channels_last, which must be as exact as torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from channels_last_graphs import IMAGES, WEIGHT, assert_same, conv, converted, instance_norm, traced
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.graph.marks import HALF, RECOMPUTE
from ort_dynamo.passes.fx.torch_graph.convert_to_channels_last import ConvertToChannelsLast

aten = torch.ops.aten
_SEEDED = torch.Generator().manual_seed(0)
SCALE, SHIFT = torch.rand(8, generator=_SEEDED) + 0.5, torch.randn(8, generator=_SEEDED)
BATCH_NORM = aten._native_batch_norm_legit.no_stats


@pytest.mark.parametrize(
    "wanted", [(True, True, True), (True, False, False), (False, True, True), (False, False, True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_instance_norm_is_summed_and_so_are_its_gradients(dtype: torch.dtype, wanted: tuple[bool, ...]) -> None:
    inputs = [one.to(dtype) for one in (IMAGES, WEIGHT, SCALE, SHIFT)]
    gm, modified = converted(lambda x, w, *rest: instance_norm(conv(x, w), *rest, wanted), *inputs)
    assert modified
    assert not gm.graph.find_nodes(op="call_function", target=BATCH_NORM)
    # One of the input, and one for each image that is returned.
    copies = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert len(copies) == (2 + wanted[0] if dtype == torch.float32 else 0)


def test_an_instance_norm_of_symbolic_sizes_computes_the_same() -> None:
    function = partial(instance_norm, wanted=(True, True, True))
    converted(lambda x, w, *rest: function(conv(x, w), *rest), IMAGES, WEIGHT, SCALE, SHIFT, mode="symbolic")


@pytest.mark.parametrize("offset", [0.0, 10.0, 1e4])
def test_an_instance_norm_of_a_large_mean_costs_no_more_digits_than_in_eager(offset: float) -> None:
    weight = torch.zeros_like(WEIGHT)
    weight[range(8), range(8), 1, 1] = 1  # the convolution returns its images
    images, wanted = IMAGES + offset, (True, True, True)
    gm = traced(lambda x, w, *rest: instance_norm(conv(x, w), *rest, wanted), images, weight, SCALE, SHIFT)
    assert ConvertToChannelsLast()(gm).modified
    truth = instance_norm(images.double(), SCALE.double(), SHIFT.double(), wanted)
    for exact, theirs, ours in zip(
        truth, instance_norm(images, SCALE, SHIFT, wanted), gm(images, weight, SCALE, SHIFT), strict=True
    ):
        rounding = 8 * torch.finfo(torch.float32).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= (theirs - exact).abs().max() + rounding


FIRST = (True, False, False)


@pytest.mark.parametrize(
    ("function", "again"),
    [
        (lambda image: (*instance_norm(image, wanted=FIRST), image.exp()), 2),
        (lambda image: (*instance_norm(image, wanted=FIRST), image.view(2, 8, 144).exp()), 2),
        (lambda image: (*instance_norm(image, wanted=FIRST), *instance_norm(image, wanted=FIRST)), 4),
        (lambda image: (*instance_norm(image, wanted=FIRST), image.relu()), 0),
    ],
)
def test_an_instance_norm_of_an_image_that_a_backward_reads_saves_no_second_one(
    function: Callable[[torch.Tensor], Any], again: int
) -> None:
    gm = traced(lambda x, w: function(conv(x, w)), IMAGES, WEIGHT)
    for node in (
        *gm.graph.find_nodes(op="call_function", target=aten.exp.default),
        *gm.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default),
    ):
        node.meta[HALF] = "is_backward"
    assert ConvertToChannelsLast()(gm).modified
    assert_same(gm, lambda x, w: function(conv(x, w)), IMAGES, WEIGHT)
    found = [one.meta.get(HALF) for one in gm.graph.find_nodes(op="call_function", target=aten.sub.Tensor)]
    assert found.count("is_backward") == again


def test_the_gradient_of_an_instance_norm_of_an_input_reads_the_input() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        image, gradient = instance_norm(x, wanted=FIRST)
        return conv(image, w), gradient

    gm, modified = converted(function, IMAGES, WEIGHT)
    assert modified
    assert len(gm.graph.find_nodes(op="call_function", target=aten.sub.Tensor)) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_an_instance_norm_with_a_weight_of_another_dtype_is_left_to_torch(dtype: torch.dtype) -> None:
    gm = traced(lambda x, w, scale: instance_norm(conv(x, w), scale.to(dtype)), IMAGES, WEIGHT, SCALE)
    ConvertToChannelsLast()(gm)
    assert gm.graph.find_nodes(op="call_function", target=BATCH_NORM)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        gm(IMAGES, WEIGHT, SCALE)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_views_that_undo_each_other_keep_the_layout(mode: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        flat = conv(x, w).relu().view(1, -1, *x.shape[2:])
        return conv(flat.view(x.shape), w).sum()

    gm, modified = converted(function, IMAGES, WEIGHT, mode=mode)
    assert modified
    copies = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert [one.kwargs["memory_format"] for one in copies] == [torch.channels_last]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: instance_norm(x[:1])[0].relu(),
        lambda x: instance_norm(x[:, :1])[0] * x,
        lambda x: BATCH_NORM(x.view(1, 16, 12, 12), None, None, True, 0.1, 1e-5)[0].view(2, -1),
        lambda x: BATCH_NORM(x.view(1, 16, 12, 12), None, None, True, 0.1, 1e-5)[1].exp(),
        lambda x: BATCH_NORM(x.view(1, 8, 24, 12), None, None, True, 0.1, 1e-5)[0].view(2, 8, 12, 12),
        lambda x: BATCH_NORM((0 * x).view(1, 16, 12, 12), None, None, True, 0.1, 0.0)[0].view(2, 8, 12, 12),
        lambda x: BATCH_NORM((0 * x).view(1, 16, 12, 12), None, None, True, 0.1, 1e-42)[0].view(2, 8, 12, 12),
    ],
)
def test_other_batch_norms_of_a_view_are_left_as_they_were_traced(function: Any) -> None:
    gm, modified = converted(lambda x, w: (function(conv(x, w)), conv(x, w).relu()), IMAGES, WEIGHT)
    assert modified
    assert gm.graph.find_nodes(op="call_function", target=BATCH_NORM)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_an_instance_norm_whose_results_a_policy_saves_is_left_as_it_was_traced(policy: CheckpointPolicy) -> None:
    gm = traced(lambda x, w: instance_norm(conv(x, w))[0].relu(), IMAGES, WEIGHT)
    for node in gm.graph.find_nodes(op="call_function", target=BATCH_NORM):
        node.meta[RECOMPUTE] = policy
    assert ConvertToChannelsLast()(gm).modified
    norms = gm.graph.find_nodes(op="call_function", target=BATCH_NORM)
    assert bool(norms) == (policy is CheckpointPolicy.MUST_SAVE)
