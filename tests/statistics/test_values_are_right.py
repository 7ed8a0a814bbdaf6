"""The value that is shown under a node's name is the one that this node computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from ort_dynamo.runtime.boxed import RunWatch
from ort_dynamo.runtime.observe.observed_run import ObservedGraph, Show


class Capture(RunWatch):
    """Holds a copy of each value."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[tuple[ObservedGraph, dict[int, Tensor]]] = []

    def observe(self, label: Sequence[Any], graph: ObservedGraph) -> Show | None:
        values: dict[int, Tensor] = {}
        self.graphs.append((graph, values))
        return lambda index, value: values.__setitem__(index, value.clone())


class Reference(Interpreter):
    """Runs the ATen operators of a graph in torch on the inputs and random numbers that were seen."""

    def __init__(self, graph: ObservedGraph, seen: dict[int, Tensor]) -> None:
        gm = graph.whole.module({})
        super().__init__(gm)
        self.order = {node: index for index, node in enumerate(gm.graph.nodes)}
        self.seen = seen
        self.values: dict[int, Any] = {}

    def run_node(self, n: Node) -> Any:
        index = self.order[n]
        if n.op == "placeholder" or "bernoulli" in str(n.target):
            self.values[index] = self.seen[index]
        else:
            self.values[index] = super().run_node(n)
        return self.values[index]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens).tanh()).flatten(0, 1), tokens.flatten())


def several_results(x: Tensor) -> Tensor:
    soft = x.softmax(-1)
    largest, _ = torch.where(soft > 0.1, soft, float("-inf")).topk(3)
    return (largest.cumsum(-1) * 2).t().contiguous()[1:] + x.sort().values[:, :3].t()[1:]


def names_of_others(x: Tensor) -> Tensor:
    """Call operators of several results, whose values have names that later nodes have too."""
    first = F.layer_norm(F.layer_norm(F.layer_norm(x, [8]), [8]), [8])
    low, high = x.split([3, 5], -1)
    other, last = (first * 2).split([5, 3], -1)
    return low.sum() + high.sum() + (other * other).sum() + last.max(-1).values.sum() + x.max(-1).values.sum()


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4))


CASES: dict[str, tuple[Callable[[], Callable[..., Tensor]], Callable[[], Tensor], int]] = {
    "mlp": (mlp, lambda: torch.randn(4, 8), 20),
    "images": (images, lambda: torch.randn(2, 3, 8, 8), 24),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda: torch.randn(2, 5, 16), 130),
    "tokens": (Tokens, lambda: torch.randint(20, (2, 5)), 15),
    "several_results": (lambda: several_results, lambda: torch.randn(4, 8, requires_grad=True), 25),
    "names_of_others": (lambda: names_of_others, lambda: torch.randn(4, 8, requires_grad=True), 25),
    "complex": (
        lambda: lambda x: torch.fft.rfft(x.exp()).abs().log(),
        lambda: torch.randn(4, 8, requires_grad=True),
        14,
    ),
}
"""name -> the model, its input, and the least number of operators whose values are seen."""


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
@pytest.mark.parametrize("name", CASES)
def test_a_value_equals_that_of_torch(name: str, placement: str) -> None:
    made, given, least = CASES[name]
    compiled = torch.compile(made(), backend="ort_train", options={"placement": placement})
    with Capture() as capture:
        compiled(given()).sum().backward()
    assert [graph.origins.role for graph, _ in capture.graphs] == ["forward", "backward"]
    operators = 0
    for graph, seen in capture.graphs:
        reference = Reference(graph, seen)
        inputs = [index for node, index in reference.order.items() if node.op == "placeholder"]
        with torch.no_grad():
            reference.run(*map(seen.__getitem__, inputs))
        for index, value in seen.items():
            expected = reference.values[index]
            assert isinstance(expected, Tensor), graph.origins.nodes[index]
            assert (value.dtype, value.shape) == (expected.dtype, expected.shape), graph.origins.nodes[index]
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=str(graph.origins.nodes[index]))
            operators += bool(graph.origins.nodes[index].overload)
    assert operators >= least


@pytest.mark.parametrize("level", ["all", "disable"])
@pytest.mark.parametrize(("name", "least"), [("mlp", 3), ("images", 5), ("encoder", 30), ("names_of_others", 10)])
def test_a_value_of_an_inference_that_onnx_runtime_optimizes_equals_that_of_torch(
    name: str, least: int, level: str
) -> None:
    made, given, _ = CASES[name]
    model = made()
    if isinstance(model, nn.Module):
        model.eval()
    options = {"placement": "onnxruntime", "graph_optimization": level}
    compiled = torch.compile(model, backend="ort_train", options=options)
    with torch.no_grad(), Capture() as capture:
        compiled(given())
    ((graph, seen),) = capture.graphs
    reference = Reference(graph, seen)
    with torch.no_grad():
        reference.run(*(seen[index] for node, index in reference.order.items() if node.op == "placeholder"))
    for index, value in seen.items():
        torch.testing.assert_close(value, reference.values[index], rtol=1e-4, atol=1e-5)
    operators = [graph.origins.nodes[index] for index in seen if graph.origins.nodes[index].overload]
    assert len(operators) >= least


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_value_of_reduced_precision_is_that_of_torch_but_for_rounding(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    compiled = torch.compile(model, backend="ort_train")
    with torch.no_grad(), Capture() as capture:
        compiled(torch.randn(4, 8, dtype=dtype))
    ((graph, seen),) = capture.graphs
    reference = Reference(graph, seen)
    with torch.no_grad():
        reference.run(*(seen[index] for node, index in reference.order.items() if node.op == "placeholder"))
    for index, value in seen.items():
        torch.testing.assert_close(value.float(), reference.values[index].float(), rtol=0.05, atol=0.05)
    operators = {graph.origins.nodes[index].overload for index in seen}
    assert {"aten.addmm.default", "aten.gelu.default"} <= operators
