"""A sigmoid that only scales tensors is marked; one whose values somebody else reads is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from joint_graphs import weight
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule

from ort_dynamo.marks import GATE
from ort_dynamo.passes.fx.mark_gates import MarkGates

Capture = Callable[..., GraphModule]


def marks(gm: GraphModule) -> list[bool]:
    sigmoids = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default)
    return [bool(node.meta.get(GATE)) for node in sigmoids]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x.sin() * x.sigmoid(), id="product"),
        pytest.param(lambda x: x.sin() * x[:, :1].sigmoid().expand(3, 4), id="view"),
    ],
)
def test_one_that_scales_is_marked(joint_graph: Capture, function: Callable[[Tensor], Tensor]) -> None:
    gm = joint_graph(function, weight(3, 4))
    for node in gm.graph.nodes:
        node.meta.pop(GATE, None)  # the fixture has run the pass
    assert run_twice(MarkGates(), gm)
    assert marks(gm) == [True]


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
    assert not run_twice(MarkGates(), gm)
    assert not any(marks(gm))
