"""Tests of the operators that may be computed twice, and of the outputs that are views to a caller."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

import ort_dynamo.backend  # noqa: F401  # registers operators of its own
from ort_dynamo.graph.marks import RECOMPUTE
from ort_dynamo.passes.fx.analysis.aliases import returned_views
from ort_dynamo.passes.fx.analysis.saved_tensors import can_recompute

aten, prims = torch.ops.aten, torch.ops.prims


def called(target: Any, *, part: bool = False, **meta: Any) -> Node:
    graph = Graph()
    node = graph.call_function(target, (graph.placeholder("x"),))
    node.meta = meta
    return graph.call_function(operator.getitem, (node, 0)) if part else node


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (called(aten.relu.default), True),
        (called(prims.convert_element_type.default), True),
        (called(aten.sort.default, part=True), True),
        (called(aten.relu_.default), False),
        (called(aten.add.out), False),
        (called(aten.bernoulli.default), False),
        (called(aten.native_dropout.default), False),
        (called(aten.native_dropout.default, part=True), False),
        (called(torch.ops.ort_dynamo.bernoulli.default), False),
        (called(torch.ops._c10d_functional.all_reduce.default), False),
        (called(torch.relu), False),
        (called(torch.ops.higher_order.cond), False),
        (called(aten.relu.default, **{RECOMPUTE: CheckpointPolicy.MUST_SAVE}), False),
        (called(aten.relu.default).all_input_nodes[0], False),
        (called(aten.sort.default, part=True, **{RECOMPUTE: CheckpointPolicy.MUST_SAVE}), False),
        (called(aten.sort.default, part=True, **{RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE}), True),
    ],
    ids=lambda one: one.format_node() if isinstance(one, Node) else str(one),
)
def test_an_operator_without_effects_and_policy_may_be_computed_twice(node: Node, expected: bool) -> None:
    assert can_recompute(node) is expected


def test_an_output_is_a_view_if_its_last_operator_makes_one() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    results = [
        graph.call_function(aten.t.default, (x,)),
        graph.call_function(aten.relu.default, (x,)),
        x,
        graph.call_function(aten.detach.default, (x,)),
        None,
        graph.call_function(aten.select.int, (x, 0, 1)),
        1,
        graph.call_function(aten.clone.default, (x,)),
        graph.call_function(operator.getitem, (graph.call_function(aten.split.Tensor, (x, 1)), 0)),
    ]
    graph.output(tuple(results))
    assert returned_views(graph) == {0, 5, 8}
