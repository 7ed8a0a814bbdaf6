"""The forward saves the mask of a result that the program sees, and not the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from joint_graphs import weight
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule

from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, is_number
from ort_dynamo.passes.fx.compare_in_forward import CompareInForward

Capture = Callable[..., GraphModule]


def saved(gm: GraphModule) -> list[str]:
    """The forward's values that the backward reads."""
    joint = JointGraph(gm)
    read = {value for node in joint.backward for value in node.all_input_nodes}
    return [node.name for node in joint.forward if node in read and not is_number(node)]


def moved(gm: GraphModule, outputs: int = 1) -> bool:
    modified = run_twice(CompareInForward(outputs), gm)
    gm.graph.lint()
    return modified


def test_the_mask_of_a_maximum_is_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: x.sin().amax(1), weight(3, 4))
    assert saved(gm) == ["sin", "amax"]
    assert moved(gm)
    assert saved(gm) == ["eq"]


def test_so_are_masks_made_of_several(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: x.median(), weight(3, 4))
    assert "median" in saved(gm)
    assert moved(gm)
    kept = set(saved(gm))
    assert {node.meta["val"].dtype for node in gm.graph.nodes if node.name in kept} == {torch.bool}


def test_one_mask_of_several_is_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: x.sin().min(), weight(3, 4))
    assert moved(gm)
    assert saved(gm) == ["logical_or"]


def test_a_mask_that_is_larger_than_what_it_frees_is_not_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x: (x.amax(1), x.sin()), weight(3, 4))  # the gradient of the sine keeps x anyway
    assert saved(gm) == ["amax"]
    assert not moved(gm, 2)


def read_beside(x: Tensor) -> tuple[Tensor, Tensor]:
    found = x.exp().amax(1, keepdim=True)
    return found, (x * found).sum()


@pytest.mark.parametrize(
    ("function", "outputs"),
    [
        pytest.param(lambda x: x.sin().amax(1).sum(), 1, id="the program does not see it"),
        pytest.param(lambda x: x.exp(), 1, id="the gradient is a product with it"),
        pytest.param(read_beside, 2, id="it is a factor as well"),
        pytest.param(lambda x: F.relu(x), 1, id="the gradient compares it in an operator of its own"),
    ],
)
def test_other_results_stay(joint_graph: Capture, function: Callable[..., object], outputs: int) -> None:
    gm = joint_graph(function, weight(3, 4))
    before = saved(gm)
    assert not moved(gm, outputs)
    assert saved(gm) == before
