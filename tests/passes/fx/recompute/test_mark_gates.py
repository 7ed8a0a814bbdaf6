"""A sigmoid that only scales tensors is marked; one with other readers is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from joint_graphs import weight
from torch import Tensor
from torch.fx import GraphModule

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.graph.marks import GATE
from ort_dynamo.passes.fx.recompute.mark_gates import MarkGates

Capture = Callable[..., GraphModule]


GATES = {
    "product": (
        """
        x: f32[3, 4]
        sin = aten.sin.default(x)  # f32[3, 4]
        sigmoid = aten.sigmoid.default(x)  # f32[3, 4]
        mul = aten.mul.Tensor(sin, sigmoid)  # f32[3, 4]
        return mul
        """,
        """
        x: f32[3, 4]
        sin = aten.sin.default(x)  # f32[3, 4]
        sigmoid = aten.sigmoid.default(x)  # f32[3, 4] | gate
        mul = aten.mul.Tensor(sin, sigmoid)  # f32[3, 4]
        return mul
        """,
    ),
    "view": (
        """
        x: f32[3, 4]
        sin = aten.sin.default(x)  # f32[3, 4]
        slice = aten.slice.Tensor(x, 1, 0, 1)  # f32[3, 1] strides (4, 1)
        sigmoid = aten.sigmoid.default(slice)  # f32[3, 1]
        expand = aten.expand.default(sigmoid, [3, 4])  # f32[3, 4] strides (1, 0)
        mul = aten.mul.Tensor(sin, expand)  # f32[3, 4]
        return mul
        """,
        """
        x: f32[3, 4]
        sin = aten.sin.default(x)  # f32[3, 4]
        slice = aten.slice.Tensor(x, 1, 0, 1)  # f32[3, 1] strides (4, 1)
        sigmoid = aten.sigmoid.default(slice)  # f32[3, 1] | gate
        expand = aten.expand.default(sigmoid, [3, 4])  # f32[3, 4] strides (1, 0)
        mul = aten.mul.Tensor(sin, expand)  # f32[3, 4]
        return mul
        """,
    ),
}
"""The graph before and after."""


@pytest.mark.parametrize("name", GATES)
def test_one_that_scales_is_marked(name: str) -> None:
    assert_fx_rewrites(MarkGates(), *GATES[name])


@pytest.mark.parametrize("name", GATES)
def test_one_that_scales_is_marked_with_its_gradient_beside_it(joint_graph: Capture, name: str) -> None:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "product": lambda x: x.sin() * x.sigmoid(),
        "view": lambda x: x.sin() * x[:, :1].sigmoid().expand(3, 4),
    }
    gm = joint_graph(functions[name], weight(3, 4))  # the fixture has run the pass
    (sigmoid,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default)
    assert sigmoid.meta[GATE]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x.sigmoid(), id="result"),
        pytest.param(lambda x: x.sigmoid().log(), id="logarithm"),
        pytest.param(lambda x: (x.sigmoid() * x.sin(), 1 / x.sigmoid()), id="product and quotient"),
        pytest.param(lambda x: (x.sigmoid()[:1] + 1e-10).log(), id="view and logarithm"),
    ],
)
def test_others_are_not(joint_graph: Capture, function: Callable[[Tensor], Tensor]) -> None:
    gm = joint_graph(function, weight(3, 4))
    assert_fx_untouched(MarkGates(), gm)
    assert not any(GATE in node.meta for node in gm.graph.nodes)
