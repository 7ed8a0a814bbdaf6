"""A planted pass on FX graphs that changes what they compute is named, with the operator and the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult
from torch.utils.checkpoint import checkpoint
from twelve_layers import TwelveLayers, batch

import ort_dynamo
from ort_dynamo.options.groups import parse_options
from ort_dynamo.passes.rewrites import Rewrite, watched_rewrites
from ort_dynamo.passes.running import run_passes
from ort_dynamo.program.read_objects import modules_among, read_by
from ort_dynamo.torch_internals.tracing.dry_run import compile_apart, released, untouched
from ort_dynamo.verification.find_rewrite import find_rewrite
from ort_dynamo.verification.record import GraphRun
from ort_dynamo.verification.step import Step
from ort_dynamo.verification.verify import _watched_backend

aten = torch.ops.aten


@dataclass(frozen=True)
class Replace(PassBase):
    """Replaces each call of one operator by another of the same arguments, in FX graphs."""

    old: str
    new: str

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite in place."""
        old, new = (getattr(aten, name).default for name in (self.old, self.new))
        found = graph_module.graph.find_nodes(op="call_function", target=old)
        for node in found:
            node.target = new
        return PassResult(graph_module, bool(found))


@pytest.fixture
def planted(request: pytest.FixtureRequest) -> Iterator[Replace]:
    wrong, first = request.param
    handle = ort_dynamo.register_pass(wrong, first=first)
    yield wrong
    handle.remove()


@pytest.mark.parametrize(
    ("planted", "node"),
    [((Replace("tanh", "sin"), True), "tanh"), ((Replace("tanh", "sin"), False), "tanh")],
    ids=["first", "last"],
    indirect=["planted"],
)
def test_a_wrong_pass_is_named(planted: Replace, node: str, tmp_path: Path) -> None:
    result = ort_dynamo.verify(TwelveLayers(), *batch(), folder=tmp_path)
    assert not result.ok
    fault = result.fault
    assert fault is not None
    assert (fault.culprit, fault.node, fault.graph) == ("pass", node, "forward")
    assert fault.cause == f"the pass {planted!r}, which rewrites the FX graph"
    assert fault.module == "special (Special)"
    assert "return torch.tanh(x)" in fault.line


@dataclass(frozen=True)
class SaysNothing(Replace):
    """Replaces calls, and says that it does not."""

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite in place."""
        return PassResult(super().call(graph_module).graph_module, False)


@pytest.mark.parametrize(
    "planted",
    [(SaysNothing("tanh", "sin"), True), (SaysNothing("tanh", "sin"), False)],
    ids=["first", "last"],
    indirect=True,
)
def test_a_pass_that_says_that_it_changes_nothing_is_named(planted: SaysNothing, tmp_path: Path) -> None:
    fault = ort_dynamo.verify(TwelveLayers(), *batch(), folder=tmp_path).fault
    assert fault is not None
    assert (fault.culprit, fault.node) == ("pass", "tanh")
    assert fault.cause == f"the pass {planted!r}, which rewrites the FX graph"


@dataclass(frozen=True)
class SpoilGradient(PassBase):
    """Doubles the gradient that goes into each tanh."""

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite in place."""
        found = graph_module.graph.find_nodes(op="call_function", target=aten.tanh_backward.default)
        for node in found:
            with graph_module.graph.inserting_before(node):
                doubled = graph_module.graph.call_function(aten.mul.Tensor, (node.args[0], 2.0))
                doubled.meta["partitioner_tag"] = "is_backward"
            node.replace_input_with(node.args[0], doubled)
        return PassResult(graph_module, bool(found))


@pytest.mark.parametrize("planted", [(SpoilGradient(), True)], ids=["gradient"], indirect=True)
def test_a_pass_that_spoils_a_gradient_is_named(planted: SpoilGradient, tmp_path: Path) -> None:
    fault = ort_dynamo.verify(TwelveLayers(), *batch(), folder=tmp_path).fault
    assert fault is not None
    assert (fault.culprit, fault.node, fault.graph) == ("pass", "tanh_backward", "backward")
    assert "SpoilGradient()" in fault.cause


@pytest.mark.parametrize("planted", [(Replace("sin", "cos"), True)], indirect=True)
def test_the_wrong_one_of_two_graphs_is_named(planted: Replace, tmp_path: Path) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) * 2
        torch._dynamo.graph_break()
        return torch.sin(y) * 3

    fault = ort_dynamo.verify(program, torch.randn(5), folder=tmp_path).fault
    assert fault is not None
    assert (fault.culprit, fault.node) == ("pass", "sin")
    assert "return torch.sin(y) * 3" in fault.line


def test_a_graph_that_did_not_run_is_not_compared() -> None:
    gm = torch.fx.symbolic_trace(lambda: torch.ones(2))
    assert find_rewrite([Rewrite("one", gm, gm)], []) is None


def test_changes_are_copies_from_before_and_after() -> None:
    gm = torch.fx.symbolic_trace(lambda x: torch.ops.aten.sin.default(x))
    gm.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.ones(2)
    with watched_rewrites() as rewrites:
        run_passes((Replace("cos", "tan"), Replace("sin", "cos"), Replace("cos", "tan")), gm)
    run_passes((Replace("tan", "sin"),), gm)
    x = torch.linspace(0, 1, 3)
    assert [one.name for one in rewrites] == [repr(Replace("sin", "cos")), repr(Replace("cos", "tan"))]
    computed = [(one.before(x), one.after(x)) for one in rewrites]
    expected = [(x.sin(), x.cos()), (x.cos(), x.tan())]
    assert all(torch.equal(*pair) for both in zip(computed, expected, strict=True) for pair in zip(*both, strict=True))


class Images(nn.Module):
    """Convolutions, batch normalization and dropout; a part of it is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(self.conv(x)).relu(), 0.3)
        x = checkpoint(lambda x: torch.tanh(x).mean((2, 3)), x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(x), labels)


def attention(x: torch.Tensor) -> torch.Tensor:
    """Attention with dropout, of one tensor's heads."""
    heads = x.view(2, 5, 2, 4).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2, is_causal=True).sum()


PROGRAMS: dict[str, Callable[[], tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]] = {
    "layers": lambda: (TwelveLayers(), batch()),
    "images": lambda: (Images(), (torch.randn(4, 3, 8, 8), torch.randint(4, (4,)))),
    "attention": lambda: (attention, (torch.randn(2, 5, 8, requires_grad=True),)),
}


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("layers", {"memory_budget": 0.3}), ("images", {}), ("attention", {"placement": "onnxruntime"})],
    ids=str,
)
def test_no_right_pass_is_blamed(name: str, half: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    program, inputs = PROGRAMS[name]()
    step = Step(inputs, modules=modules_among(read_by(program)))
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=half),
        untouched(),
        released() as around,
        _watched_backend(parse_options(None, options), around) as (backend, compiles),
    ):
        step.observe(compile_apart(program, backend=backend))
        ((rewrites, recorder),) = compiles
        assert len(rewrites) > 3
        assert find_rewrite(rewrites, recorder.runs) is None
        compared = [one for one in rewrites if runs_in_torch(one, recorder.runs)]
        assert len(compared) > len(rewrites) // 2


def runs_in_torch(rewrite: Rewrite, runs: Sequence[GraphRun]) -> bool:
    """Check whether a change is one that `find_rewrite` can compare."""
    blamed = replace(rewrite, after=spoilt(rewrite.after))
    return find_rewrite([blamed], runs) is not None


def spoilt(gm: GraphModule) -> GraphModule:
    """Copy a graph, and have it return twice the first result that is a tensor."""
    graph = Graph()
    results = list(graph.graph_copy(gm.graph, {}))
    place, first = next(
        (place, one)
        for place, one in enumerate(results)
        if isinstance(one, Node) and getattr(one.meta.get("val"), "is_floating_point", lambda: False)()
    )
    results[place] = graph.call_function(torch.add, (first, 1.0))
    graph.output(tuple(results))
    return GraphModule(gm, graph)
