"""The operand of a ReLU, computed again, decides the gradient in place of the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from joint_graphs import weight
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ort_dynamo.passes.fx.recompute.recompute_pointwise import RecomputePointwise

Capture = Callable[..., GraphModule]

aten = torch.ops.aten


def normalized(image: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    less = image - image.mean(0)
    return less * (less * less).mean(0).add(1e-5).rsqrt() * scale + bias


def compared(gm: GraphModule) -> list[str]:
    """Return the operators whose signs the gradients of ReLUs read."""
    nodes = gm.graph.find_nodes(op="call_function", target=aten.threshold_backward.default)
    return [str(node.args[1].target) for node in nodes if isinstance(node.args[1], Node)]


def test_the_operand_decides_if_the_backward_reads_the_image_anyway(joint_graph: Capture) -> None:
    def net(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor, v: Tensor) -> Tensor:
        return (torch.relu(normalized((x @ w).bfloat16().float(), scale, bias)).bfloat16() @ v.bfloat16()).float().sum()

    given = weight(512, 4), weight(4, 64), weight(64), weight(64), weight(64, 8)
    gm = joint_graph(net, *given)
    inputs = list(given), [torch.tensor(1.0)]
    expected = tree_leaves(gm(*inputs))
    assert run_twice(RecomputePointwise(), gm)
    assert compared(gm) == ["aten.add.Tensor"]
    for after, before in zip(tree_leaves(gm(*inputs)), expected, strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, v, b: (torch.relu(x @ w + b) @ v).sum(),
        lambda x, w, v, b: (torch.relu(normalized(x @ w, b, b) + x.square()) @ v).sum(),
        lambda x, w, v, b: (y := normalized(x @ w, b, b), (torch.relu(y) @ v).sum()),
        lambda x, w, v, b: (torch.relu(F.layer_norm(x, (64,)) + (z := x @ w) * z) @ v).sum(),
        lambda x, w, v, b: (F.threshold(normalized(x @ w, b, b), 0.5, 0.5) @ v).sum(),
    ],
    ids=[
        "a matmul's result, which is not saved",
        "a second image",
        "an operand that is returned",
        "a result of several",
        "a threshold",
    ],
)
def test_other_gradients_read_the_same(function: Callable[..., Tensor], joint_graph: Capture) -> None:
    gm = joint_graph(function, weight(512, 64), weight(64, 64), weight(64, 8), weight(64))
    before = compared(gm)
    RecomputePointwise()(gm)
    assert compared(gm) == before
    assert len(before) == 1
