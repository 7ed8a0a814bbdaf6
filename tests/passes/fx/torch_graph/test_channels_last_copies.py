"""Tests of channels_last propagation: which convolutions get it, and the graph and the layout of each copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from channels_last_graphs import IMAGES, WEIGHT, assert_same, conv, converted, traced

from ort_dynamo.graph.marks import HALF, RECOMPUTE
from ort_dynamo.passes.fx.torch_graph.convert_to_channels_last import ConvertToChannelsLast
from ort_dynamo.torch_internals.kernels.kernel_layouts import convolves_in_onednn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_convolutions_that_onednn_does_not_compute_stay_as_they_are(dtype: torch.dtype) -> None:
    gm = traced(conv, IMAGES.to(dtype), WEIGHT.to(dtype))
    assert ConvertToChannelsLast()(gm).modified == convolves_in_onednn(dtype)


@pytest.mark.parametrize("to_channels_last", [True, False])
@pytest.mark.parametrize("half", ["is_forward", "is_backward", None])
def test_a_copy_is_computed_in_the_graph_of_its_reader(half: str | None, to_channels_last: bool) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if to_channels_last:
            return conv(x, w) * x.neg()
        return torch.logcumsumexp(conv(x, w).neg(), 1)  # reads its traced layout

    gm = traced(function, IMAGES, WEIGHT)
    (source,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    (reader,) = (node for node in source.users if node.op == "call_function")
    for node in gm.graph.nodes:
        node.meta[HALF] = "is_forward"
    source.meta |= {RECOMPUTE: "policy", "ac_graph_id": 1}
    del reader.meta[HALF]
    if half:
        reader.meta[HALF] = half
    assert ConvertToChannelsLast()(gm).modified
    (copied,) = (one for one in reader.all_input_nodes if one.target is torch.ops.aten.clone.default)
    assert copied.args == (source,)
    assert copied.meta.get(HALF) == half
    # It is recomputed with its source only in the same graph.
    assert ("ac_graph_id" in copied.meta, RECOMPUTE in copied.meta) == (half == "is_forward", half == "is_forward")


def test_a_copy_for_the_caller_is_computed_where_its_source_is() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return conv(x, w).relu()

    gm = traced(function, IMAGES, WEIGHT)
    (source,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    source.meta[HALF] = "is_backward"
    assert ConvertToChannelsLast()(gm).modified
    (copied,) = gm.graph.output_node().all_input_nodes
    assert copied.args == (source,)
    assert copied.meta[HALF] == "is_backward"


def test_a_returned_view_of_a_copy_comes_after_the_copy() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        image = conv(x, w).relu()
        rows = image[:, 2:]
        return rows, torch.logcumsumexp(image, 1)  # reads a copy of the image in its traced layout

    gm = traced(function, IMAGES, WEIGHT)
    assert ConvertToChannelsLast()(gm).modified
    gm.graph.lint()
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)) == 2  # there, and back
    assert_same(gm, function, IMAGES, WEIGHT)


def test_a_result_that_was_traced_in_a_permuted_layout_is_returned_in_it() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return conv(x, w).transpose(2, 3) + 1  # the layout of the transposed image

    _, modified = converted(function, IMAGES, WEIGHT)
    assert modified


@pytest.mark.parametrize("asked", [lambda x: x.shape[2] * x.shape[3], lambda x: x.numel()], ids=["sizes", "count"])
def test_a_size_is_asked_of_no_copy(asked: Callable[[torch.Tensor], int]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        image = conv(x, w)
        return conv(image * asked(image), w).sum()

    gm, modified = converted(function, IMAGES, WEIGHT, mode="symbolic")
    assert modified
    assert not [node for node in gm.graph.nodes if node.kwargs.get("memory_format") is torch.contiguous_format]


def test_numbers_of_the_layout_stay_symbols_when_the_trace_finds_their_value() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        image = conv(x, w)
        result = image * image.stride(1) * image.shape[3]
        assert image.shape[2] == image.shape[3] == 12  # a guard, after the numbers
        return result.sum()

    gm = traced(function, IMAGES, WEIGHT, mode="symbolic")
    assert ConvertToChannelsLast()(gm).modified
    numbers = [node for node in gm.graph.nodes if "sym_" in str(node.target)]
    assert numbers
    assert all(isinstance(node.meta["val"], torch.SymInt) for node in numbers)


def test_the_gradient_of_a_weight_has_the_layout_that_it_was_traced_in() -> None:
    def function(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        given = (g, x, w, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return torch.ops.aten.convolution_backward(*given, [True, True, False])[:2]

    weight = WEIGHT.to(memory_format=torch.channels_last)
    _, modified = converted(function, torch.randn(2, 8, 12, 12), IMAGES, weight)
    assert modified


def test_without_onednn_nothing_is_converted() -> None:
    gm = traced(conv, IMAGES, WEIGHT)
    torch._C._set_mkldnn_enabled(False)  # `enabled` may be frozen, by torch's own helpers for tests
    try:
        assert not ConvertToChannelsLast()(gm).modified
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert ConvertToChannelsLast()(gm).modified
