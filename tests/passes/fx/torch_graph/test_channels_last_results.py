"""Results of a convolution in channels_last: other ranks, several results, random numbers, copies with a format."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from channels_last_graphs import IMAGES, WEIGHT, conv, converted, traced
from run_twice import run_twice

from ort_dynamo.graph.marks import CHOSEN
from ort_dynamo.passes.fx.torch_graph.convert_to_channels_last import ConvertToChannelsLast

aten = torch.ops.aten

RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a row": lambda x: x * x.new_ones(12),
    "a number of each channel": lambda x: x * x.new_ones(8, 1, 1).expand(8, 12, 12).exp(),
    "an expanded operand of a lower rank": lambda x: x.new_ones(8, 1, 1).expand(8, 12, 12) * x,
    "an expanded operand": lambda x: x[:, :, :1, :1].expand(2, 8, 12, 12) * x,
    "a number to the power of": lambda x: aten.pow.Scalar(2, x),
    "a number to the power of an expanded one": lambda x: aten.pow.Scalar(2, x[:, :, :1, :1].expand(2, 8, 12, 12)) * x,
    "a copy": lambda x: x.clone(),
    "a copy that is computed with": lambda x: x.clone().exp(),
    "a contiguous copy": lambda x: aten.clone(x, memory_format=torch.contiguous_format),
    "a contiguous copy that is computed with": lambda x: aten.clone(x, memory_format=torch.contiguous_format).exp(),
    "a copy in channels_last": lambda x: x.clone(memory_format=torch.channels_last).exp(),
    "zeros": lambda x: aten.zeros_like(x, memory_format=torch.contiguous_format) + x,
    "contiguous zeros of contiguous rows": lambda x: (
        aten.zeros_like(x.permute(0, 2, 3, 1), memory_format=torch.contiguous_format) + 1
    ),
    "one image": lambda x: x[0].exp(),
    "images of one position": lambda x: x[:, :, :1, :1].exp(),
    "images of one channel": lambda x: x[:, :1].exp() * x,
    "half of the channels": lambda x: x[:, :4].exp(),
    "half of the channels, gated by the others": lambda x: x[:, :4] * x[:, 4:].sigmoid(),
    "a part of each image": lambda x: x[:, :, 2:9, ::2].exp() + 1,
    "the two halves of the channels": lambda x: [half.exp() for half in x.chunk(2, 1)],
    "a half of the channels itself, and the other one": lambda x: (x.chunk(2, 1)[0], x.chunk(2, 1)[1].relu()),
    "parts of other sizes, from the end": lambda x: torch.cat([x.split([3, 5], -3)[1].exp(), x.split(5, 1)[1]], 1),
    "parts of images": lambda x: [part.relu() for part in x.split(5, 2)],
    "a pool of half of the channels": lambda x: F.avg_pool2d(x[:, :4], 2),
    "one image of several": lambda x: x[:1].exp() * x,
    "more dimensions": lambda x: x.unsqueeze(0).exp(),
    "more dimensions, in another order": lambda x: x.unsqueeze(0).permute(1, 0, 3, 4, 2).exp(),
    "several results": lambda x: x.frexp(),
    "several results of an expanded operand": lambda x: x[:, :, :1, :1].expand(2, 8, 12, 12).frexp(),
    "statistics": lambda x: torch.var_mean(x, 1),
    "a maximum and its places": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "a pool of a transpose": lambda x: F.avg_pool2d(x.transpose(2, 3), 2),
    "a pool with channels as rows": lambda x: F.max_pool2d(x.transpose(1, 2), 2),
    "the largest": lambda x: x.topk(2, 1),
    "views of both": lambda x: (x.permute(0, 2, 3, 1), x.flatten(2).exp()),
    "the image twice": lambda x: (x, x.relu(), x.view(2, 8, 144)),
    "a view whose size is computed after a copy": lambda x: (x.cumsum(1), x[:, :, : (x.shape[2] - 1) // 2]),
    "columns in reverse": lambda x: (x.transpose(1, 3) * 2).transpose(1, 3) + x,
}


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", RESULTS)
def test_results_are_the_same_in_values_and_strides(name: str, mode: str) -> None:
    _, modified = converted(lambda x, w: RESULTS[name](conv(x, w)), IMAGES, WEIGHT, mode=mode)
    assert modified


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: aten.bernoulli.p(x, 0.5) * x,
        lambda x: aten.rand_like(x) * x,
        lambda x: aten.native_dropout(x, 0.5, True),
        lambda x: aten.bernoulli.p(x[:, :, :1, :1].expand(2, 8, 12, 12), 0.5) * x,
        lambda x: aten.native_dropout(x[:, :, :1, :1].expand(2, 8, 12, 12), 0.5, True),
    ],
)
def test_each_element_gets_the_random_number_that_it_was_traced_with(draw: Callable[[torch.Tensor], Any]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        found = draw(conv(x, w))
        return found if isinstance(found, tuple) else (found,)

    gm = traced(function, IMAGES, WEIGHT)
    assert run_twice(ConvertToChannelsLast(), gm)
    assert "channels_last" in gm.code
    torch.manual_seed(0)
    expected = function(IMAGES, WEIGHT)
    torch.manual_seed(0)
    for ours, theirs in zip(gm(IMAGES, WEIGHT), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("placed", [True, False])
def test_parts_of_a_result_need_no_placement(placed: bool) -> None:
    gm = traced(lambda x, w: conv(x, w).frexp(), IMAGES, WEIGHT)
    for node in gm.graph.nodes:
        if node.target is operator.getitem or (not placed and node.target is aten.frexp.Tensor):
            del node.meta[CHOSEN]
    assert run_twice(ConvertToChannelsLast(), gm) == placed
