"""Graphs of permuted images compute the same, whatever stands between the convolutions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from image_graphs import CLOSE, SMALL, W, X, convolution, random, traced
from run_twice import run_twice
from torch import Tensor

from ort_dynamo.passes.fx.torch_graph.permute_images import PermuteImages
from ort_dynamo.testing import assert_close
from ort_dynamo.torch_internals.kernels.operators import aten

as_double = partial(aten._to_copy, dtype=torch.float64)

BETWEEN: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "a scalar": lambda x, row, image: x * row[0],
    "a value of each column": lambda x, row, image: x + row,
    "a value of each channel": lambda x, row, image: x * row[:, None, None],
    "an image": lambda x, row, image: (x - image).relu(),
    "more dimensions": lambda x, row, image: (x + image[None])[0],
    "a broadcast image": lambda x, row, image: x[:1] + image,
    "a copy with a format": lambda x, row, image: aten._to_copy(
        x, dtype=torch.float64, memory_format=torch.contiguous_format
    ),
    "a copy that keeps its format": lambda x, row, image: aten._to_copy(
        x, dtype=torch.float32, memory_format=torch.preserve_format
    ),
    "a clone in channels_last": lambda x, row, image: x.clone(memory_format=torch.channels_last),
    "random numbers": lambda x, row, image: x * (torch.bernoulli(torch.ones_like(x)) + 1),
    "two results": lambda x, row, image: x.frexp(),
    "a sum of all": lambda x, row, image: aten.sum.dim_IntList(x, []),
    "a sum of positions": lambda x, row, image: x.sum((2, 3)),
    "a sum of positions, kept": lambda x, row, image: x.sum((-1, -2), keepdim=True) * x,
    "a sum of channels": lambda x, row, image: x.sum(1),
    "a sum of channels, kept": lambda x, row, image: x.sum(1, keepdim=True) + x,
    "a sum of rows": lambda x, row, image: x.sum((0, 3)),
    "a sum in another type": lambda x, row, image: x.sum((2, 3), dtype=torch.float64),
    "a mean": lambda x, row, image: x.mean((2, 3), keepdim=True) * x,
    "joined images": lambda x, row, image: torch.cat([x, image, x])[:2],
    "joined channels": lambda x, row, image: torch.cat([x, x.relu()], 1)[:, 4:12],
    "joined columns": lambda x, row, image: torch.cat([x, x * 2], -1)[..., 4:12],
    "parts that are joined": lambda x, row, image: torch.cat([x[0], x[1]]).view(2, 8, 8, 8),
    "an expanded gradient": lambda x, row, image: x * x.mean((2, 3), keepdim=True).expand(2, 8, 8, 8),
    "a view as rows": lambda x, row, image: x.view(2, 8, 64).softmax(-1).view(2, 8, 8, 8),
    "a transpose of positions": lambda x, row, image: x.transpose(2, 3) + x,
    "a transpose of channels": lambda x, row, image: x.transpose(1, 2) + x,
    "a transpose that is no image's": lambda x, row, image: image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 2, 1),
    "an image from its channels last": lambda x, row, image: image.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "another permutation": lambda x, row, image: image.relu().permute(0, 2, 3, 1),
    "arithmetic on the channels last": lambda x, row, image: x.permute(0, 2, 3, 1) * 2,
    "rows of the channels last": lambda x, row, image: (x.permute(0, 2, 3, 1) * 2).relu().reshape(16, 64),
    "an image in another order": lambda x, row, image: image.transpose(2, 3).contiguous().transpose(2, 3) + x,
    "a sum in another order": lambda x, row, image: (image.transpose(1, 2).contiguous().transpose(1, 2) * x).sum(3),
    "a flip": lambda x, row, image: x.flip(1),
    "a comparison": lambda x, row, image: torch.where(x > 0, x, image),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_results_are_the_same_in_values_and_layout(name: str) -> None:
    def function(x: Tensor, w: Tensor, v: Tensor, row: Tensor, image: Tensor) -> Any:
        x = convolution(x, w)
        found = BETWEEN[name](x, row, image)
        found, *rest = found if isinstance(found, tuple) else (found,)
        fits = found.shape == x.shape and found.dtype == x.dtype
        return (convolution(found, v) if fits else found, found, *rest)

    inputs = X, W, SMALL, random(8), random(2, 8, 8, 8)
    gm = traced(function, *inputs)
    run_twice(PermuteImages(), gm)
    results, expected = gm(*inputs), function(*inputs)
    for index, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        assert_close(ours, theirs, f"result {index}", CLOSE)
