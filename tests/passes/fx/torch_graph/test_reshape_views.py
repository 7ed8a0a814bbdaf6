"""Views of torch's results hold whatever strides a kernel gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.passes.fx.torch_graph.reshape_views import ReshapeViews
from ort_dynamo.segment.segment import segment
from ort_dynamo.torch_internals.operators import aten


def outer(function: Callable[..., Any], *inputs: Tensor, islands: tuple[Any, ...] = ()) -> GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*inputs)

    def refuse(node: Node) -> str | None:
        return None if node.target in islands else "torch's"

    return segment(gm, refuse, torch.device("cpu")).gm


def targets(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def test_a_view_of_what_torch_computed_is_a_reshape() -> None:
    gm = outer(lambda x: (x.sin().view(6), torch.ops.aten._unsafe_view(x, [3, 2])), torch.ones(2, 3))
    assert run_twice(ReshapeViews(), gm)
    assert targets(gm) == ["aten.sin.default", "aten.reshape.default", "aten.reshape.default"]


def test_a_view_of_what_a_session_computed_stays() -> None:
    gm = outer(lambda x: x.sin().view(6), torch.ones(2, 3), islands=(aten.sin.default,))
    assert not run_twice(ReshapeViews(), gm)


def test_strides_that_nobody_promised_are_no_error() -> None:
    gm = outer(lambda x: x.sin().view(24) * 2, torch.ones(1, 2, 3, 4))
    run_twice(ReshapeViews(), gm)
    x = torch.randn(1, 2, 3, 4)
    result = gm(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(result, x.sin().reshape(24) * 2)
