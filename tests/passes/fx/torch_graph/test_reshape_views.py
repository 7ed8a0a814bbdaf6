"""Views of torch's results are valid for any strides that a kernel gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.torch_graph.reshape_views import ReshapeViews
from ort_dynamo.segment.segment import segment
from ort_dynamo.torch_internals.kernels.operators import aten


def outer(function: Callable[..., Any], *inputs: Tensor, islands: tuple[Any, ...] = ()) -> GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*inputs)

    def refuse(node: Node) -> str | None:
        return None if node.target in islands else "torch's"

    return segment(gm, refuse, torch.device("cpu")).gm


def test_a_view_of_torchs_result_becomes_a_reshape() -> None:
    assert_fx_rewrites(
        ReshapeViews(),
        """
        x: f32[2, 3]
        sin = aten.sin.default(x)  # f32[2, 3]
        view = aten.view.default(sin, [6])  # f32[6]
        _unsafe_view = aten._unsafe_view.default(x, [3, 2])  # f32[3, 2]
        return (view, _unsafe_view)
        """,
        """
        x: f32[2, 3]
        sin = aten.sin.default(x)  # f32[2, 3]
        reshape = aten.reshape.default(sin, [6])  # f32[6]
        reshape_1 = aten.reshape.default(x, [3, 2])  # f32[3, 2]
        return (reshape, reshape_1)
        """,
    )


def test_a_view_of_a_sessions_output_stays() -> None:
    gm = outer(lambda x: x.sin().view(6), torch.ones(2, 3), islands=(aten.sin.default,))
    assert_fx_untouched(ReshapeViews(), gm)


def test_strides_that_nobody_promised_are_no_error() -> None:
    gm = outer(lambda x: x.sin().view(24) * 2, torch.ones(1, 2, 3, 4))
    assert_fx_rewrites(
        ReshapeViews(),
        """
        x_1: f32[1, 2, 3, 4]
        sin = aten.sin.default(x_1)  # f32[1, 2, 3, 4]
        view = aten.view.default(sin, [24])  # f32[24]
        mul = aten.mul.Tensor(view, 2)  # f32[24]
        return mul
        """,
        """
        x_1: f32[1, 2, 3, 4]
        sin = aten.sin.default(x_1)  # f32[1, 2, 3, 4]
        reshape = aten.reshape.default(sin, [24])  # f32[24]
        mul = aten.mul.Tensor(reshape, 2)  # f32[24]
        return mul
        """,
        gm,
    )
    x = torch.randn(1, 2, 3, 4)
    result = gm(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(result, x.sin().reshape(24) * 2)
