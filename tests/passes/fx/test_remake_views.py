"""What is saved, with and without the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from joint_graphs import weight
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.marks import HALF, RECOMPUTE
from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, is_number
from ort_dynamo.passes.fx.merge_views import MergeViews
from ort_dynamo.passes.fx.remake_views import RemakeViews

aten = torch.ops.aten
Capture = Callable[..., GraphModule]


def saved(gm: GraphModule) -> list[str]:
    """What the backward reads of the forward and of the graph's inputs."""
    later = JointGraph(gm).backward
    read = {value for node in later for value in node.all_input_nodes}
    return [n.name for n in gm.graph.nodes if n in read and n not in later and "tangents" not in n.name]


def numbers(gm: GraphModule) -> set[str]:
    """The sizes among them."""
    return {n.name for n in gm.graph.nodes if is_number(n)} & set(saved(gm))


def remade(gm: GraphModule) -> bool:
    modified = run_twice(RemakeViews(), gm)
    gm.graph.lint()
    return modified


def test_a_transposed_weight_is_saved_as_it_is(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: F.linear(x, w).exp().sum(), weight(5, 3), weight(4, 3))
    assert saved(gm) == ["primals_1", "t", "exp"]
    assert remade(gm)
    assert saved(gm) == ["primals_1", "primals_2", "exp"]


def test_three_views_of_one_tensor_are_one_saved_tensor(joint_graph: Capture) -> None:
    def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = x.sin()
        a, b, c = (F.linear(x, one) for one in (q, k, v))
        return (a.exp() + b.exp() + c.exp()).sum()

    gm = joint_graph(attention, weight(2, 5, 3), *(weight(3, 3) for _ in range(3)))
    MergeViews()(gm)
    assert remade(gm)
    assert [name for name in saved(gm) if name.startswith(("sin", "view", "t"))] == ["sin"]
    again = [n for n in gm.graph.nodes if n.meta.get(HALF) == "is_backward" and n.target is aten.view.default]
    assert sum(n.args[0].name == "sin" for n in again) == 1


def test_a_chain_of_views_begins_at_what_is_saved(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (x.sin().transpose(0, 1).view(-1, 6) @ w).exp().sum(), weight(2, 1, 6), weight(6, 2))
    assert remade(gm)
    assert not {"transpose", "view", "permute"} & {name.rstrip("_0123456789") for name in saved(gm)}


def test_the_numbers_of_a_symbolic_view_are_ones_that_the_backward_reads(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x.sin().view(x.shape[0] * x.shape[1], 3) @ w).exp().sum()

    gm = joint_graph(function, weight(2, 5, 3), weight(3, 3), dynamic=True)
    before = numbers(gm)
    assert remade(gm)
    assert numbers(gm) == before
    assert "view" not in saved(gm)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x.sin()[1:] * w).exp().sum(),
        lambda x, w: (x.sin().split(1)[1] * w).exp().sum(),
        lambda x, w: (x.sin().expand(2, 2, 3) * w).exp().sum(),
    ],
    ids=["slice", "split", "expand"],
)
def test_parts_and_repetitions_cross_as_they_are(function: Callable[..., Any], joint_graph: Capture) -> None:
    gm = joint_graph(function, weight(2, 3), weight(1, 3))
    before = saved(gm)
    remade(gm)
    assert saved(gm) == before


def test_what_is_computed_again_stays_the_partitioners(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: F.linear(x, w.sin()).exp().sum(), weight(5, 3), weight(4, 3))
    (view,) = (n for n in JointGraph(gm).forward if n.target is aten.t.default)
    (reader,) = (user for user in view.users if JointGraph(gm).is_forward(user))
    for node in (*view.all_input_nodes, view, reader):
        node.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
        assert not remade(gm)
        del node.meta[RECOMPUTE]
    assert remade(gm)


def test_a_view_of_an_input_that_is_written_to_is_saved_itself(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: F.linear(x, w).exp().sum(), weight(5, 3), weight(4, 3))
    _, written = (n for n in gm.graph.find_nodes(op="placeholder") if "primals" in n.name)
    with gm.graph.inserting_before(JointGraph(gm).forward[-1]):
        copied = gm.graph.call_function(aten.copy_.default, (written, written))
    copied.meta = {**JointGraph(gm).forward[-1].meta, "val": written.meta["val"]}
    assert not remade(gm)
    gm.graph.erase_node(copied)
    assert remade(gm)
