"""Tests of probing: of equal nodes one is lowered; nodes that differ are lowered each."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ort_dynamo.segment.probe_lowering import LoweringProbe
from ort_dynamo.torch_internals.sizes.size_guards import SIZE_FACTS, Fact

aten = torch.ops.aten


FACTS = (Fact("asked", (), None),)


class Tries:
    """A refusal that remembers which nodes it was asked about."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def __call__(self, node: Node) -> str | None:
        self.nodes.append(node)
        node.meta[SIZE_FACTS] = FACTS
        return "refused" if node.target is aten.sin.default else None


def graph_of(*calls: tuple[Any, ...], dynamic: bool = False, shapes: Any = ((2, 3),)) -> list[Node]:
    """Nodes that each call an operator on the graph's inputs (given by number) and constants."""
    graph, mode = Graph(), FakeTensorMode(shape_env=ShapeEnv())
    inputs = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    for node, shape in zip(inputs, shapes, strict=True):
        node.meta["val"] = mode.from_tensor(torch.empty(shape), static_shapes=not dynamic)
    made = []
    for target, first, *rest in calls:
        node = graph.call_function(target, (inputs[first], *rest))
        with mode:
            node.meta["val"] = target(inputs[first].meta["val"], *rest)
        made.append(node)
    return made


def tried(nodes: list[Node]) -> list[Node]:
    tries = Tries()
    probe = LoweringProbe(tries)
    for node in nodes:
        reason = probe(node)
        assert reason == ("refused" if node.target is aten.sin.default else None)
        assert node.meta[SIZE_FACTS] == FACTS
    return tries.nodes


def test_one_of_those_that_are_alike() -> None:
    nodes = graph_of(
        (aten.sin.default, 0), (aten.cos.default, 0), (aten.sin.default, 0), (aten.cos.default, 1), shapes=[(2, 3)] * 2
    )
    assert tried(nodes) == nodes[:2]


DIFFERENT: list[Callable[[], list[Node]]] = [
    lambda: graph_of((aten.mul.Scalar, 0, 2), (aten.mul.Scalar, 0, 2.0), (aten.mul.Scalar, 0, True)),
    lambda: graph_of((aten.mul.Scalar, 0, 0.0), (aten.mul.Scalar, 0, -0.0)),
    lambda: graph_of(
        (aten.sum.dim_IntList, 0, [0]), (aten.sum.dim_IntList, 0, [1]), (aten.sum.dim_IntList, 0, [0], True)
    ),
    lambda: graph_of((aten.cos.default, 0), (aten.cos.default, 1), shapes=[(2, 3), (3, 2)]),
]


@pytest.mark.parametrize("nodes", DIFFERENT)
def test_each_of_those_that_differ(nodes: Callable[[], list[Node]]) -> None:
    made = nodes()
    assert tried(made) == made


def test_strides_and_dtypes_differ() -> None:
    nodes = graph_of((aten.cos.default, 0), (aten.cos.default, 1), shapes=[(2, 3)] * 2)
    (second,) = nodes[1].all_input_nodes
    for other in (torch.empty(3, 2, device="meta").t(), torch.empty(2, 3, dtype=torch.float64, device="meta")):
        second.meta["val"] = other
        assert tried(nodes) == nodes


def test_nodes_with_different_results_read_are_probed_separately() -> None:
    nodes = graph_of((aten.max.dim, 0, 0), (aten.max.dim, 0, 0), (aten.max.dim, 0, 0))
    for node, index in zip(nodes, (0, 1, 0), strict=True):
        node.graph.call_function(getitem, (node, index))
    assert tried(nodes) == nodes[:2]


def test_symbolic_sizes_are_tried_each_time() -> None:
    nodes = graph_of((aten.cos.default, 0), (aten.cos.default, 0), dynamic=True)
    assert tried(nodes) == nodes


def test_a_deep_model_tries_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from ort_dynamo.segment import probe_lowering

    counts = []
    for depth in (1, 6):
        tries: list[Node] = []
        refusal = probe_lowering.refusal

        def counting(node: Node, tries: list[Node] = tries, refusal: Any = refusal, **given: Any) -> str | None:
            tries.append(node)
            return refusal(node, **given)

        with monkeypatch.context() as patched:
            patched.setattr(probe_lowering, "refusal", counting)
            torch._dynamo.reset()
            layers = torch.nn.Sequential(
                *(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(depth))
            )
            torch.compile(layers, backend="ort_train")(torch.ones(2, 4, requires_grad=True)).sum().backward()
        counts.append(len(tries))
    assert counts[1] <= counts[0] + 3
