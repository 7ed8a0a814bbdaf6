"""Passes that a program adds run, in order, and are part of the graph key."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

import ort_dynamo
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.graph.graph_key import graph_key
from ort_dynamo.passes import outside
from ort_dynamo.passes.outside import outside_functions
from ort_dynamo.report.record import RECORDS


@pytest.fixture(autouse=True)
def none_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside, "_FIRST", OrderedDict())
    monkeypatch.setattr(outside, "_LAST", OrderedDict())


@dataclass(frozen=True)
class Negate(ir.passes.InPlacePass):
    """Each Abs becomes another operator."""

    instead: str = "Neg"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == "Abs"]
        for node in found:
            node.op_type = self.instead
        return ir.passes.PassResult(model, modified=bool(found))


@dataclass(frozen=True)
class Double(PassBase):
    """Each sum of two tensors becomes that of the first with itself."""

    def call(self, graph_module: GraphModule) -> PassResult:
        found = graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        for node in found:
            node.args = (node.args[0], node.args[0])
        return PassResult(graph_module, bool(found))


def magnitude(x: Tensor) -> Tensor:
    return x.abs()


def run(function: Any, *args: Tensor, **options: Any) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(function, backend="ort_train", options=options)(*args)


@pytest.mark.parametrize("verify", [False, True])
def test_a_pass_on_models_runs_until_it_is_removed(verify: bool) -> None:
    x = torch.tensor([-1.0, 2.0])
    handle = ort_dynamo.register_pass(Negate())
    assert run(magnitude, x, debug={"verify": verify}).tolist() == [1.0, -2.0]
    handle.remove()
    assert run(magnitude, x, debug={"verify": verify}).tolist() == [1.0, 2.0]


def test_a_pass_on_joint_graphs_changes_gradients() -> None:
    ort_dynamo.register_pass(Double())
    x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([5.0])
    found = run(lambda x, y: x * 3 + y, x, y)
    assert found.tolist() == [6.0]


def names() -> list[str]:
    (record,) = RECORDS
    return [one.name.partition("(")[0] for one in record.graphs[0].islands[0].build.passes]


def test_they_run_in_the_order_of_the_calls_and_before_or_after_ours() -> None:
    ort_dynamo.register_pass(Negate("Ceil"))
    ort_dynamo.register_pass(Negate("Floor"), first=True)
    ort_dynamo.register_pass(Negate("Neg"), first=True)
    assert run(magnitude, torch.tensor([-1.5])).tolist() == [-2.0]  # the first of the first
    assert names()[:2] == ["Negate", "Negate"]
    assert names().index("TakeShapesEarly") > len(names()) - 1 - names()[::-1].index("Negate")


def test_parameters_are_part_of_the_key() -> None:
    x = torch.tensor([-1.5])
    for instead, expected in (("Neg", 1.5), ("Ceil", -1.0)):
        handle = ort_dynamo.register_pass(Negate(instead))
        assert torch.compile(lambda x: x.abs(), backend="ort_train")(x).tolist() == [expected]
        torch.compiler.reset()
        handle.remove()


def define(operator: str) -> ir.passes.InPlacePass:
    scope: dict[str, Any] = {"__name__": "a_program"}
    exec(  # as a cell of a notebook that is run again
        "import onnx_ir as ir\n"
        "class Change(ir.passes.InPlacePass):\n"
        "    def call(self, model):\n"
        "        for node in model.graph:\n"
        "            self.change(node)\n"
        "        return ir.passes.PassResult(model, modified=True)\n"
        "    def change(self, node):\n"
        f"        if node.op_type == 'Abs': node.op_type = '{operator}'\n",
        scope,
    )
    return scope["Change"]()


def test_a_changed_method_is_another_key_and_the_same_one_is_a_hit() -> None:
    x, functions = torch.tensor([-1.5]), [lambda x: x.abs(), lambda y: y.abs(), lambda z: z.abs()]
    results, sizes = [], []
    for operator, function in zip(("Neg", "Ceil", "Neg"), functions, strict=True):
        handle = ort_dynamo.register_pass(define(operator))
        results.append(torch.compile(function, backend="ort_train")(x).item())
        sizes.append(len(CACHE))
        handle.remove()
    assert results == [1.5, -1.0, 1.5]
    assert sizes == [1, 2, 2]


def made(**attributes: Any) -> ir.passes.InPlacePass:
    """A pass whose class has these attributes."""
    return type("Made", (Negate,), {"__module__": "program", **attributes})()


def cached(number: int) -> Any:
    return functools.cache(lambda self: self + number)


def cached_property(number: int) -> Any:
    return functools.cached_property(lambda self: self + number)


@pytest.mark.parametrize(
    "attribute", [int, cached, cached_property, lambda n: property(lambda self: n), lambda n: (n,)]
)
def test_an_attribute_of_its_class_is_part_of_the_key(attribute: Callable[[int], Any]) -> None:
    gm = make_fx(magnitude, tracing_mode="fake")(torch.ones(2))
    keys = [graph_key(gm, functions=outside_functions([made(wanted=attribute(number))])) for number in (1, 1, 2)]
    assert None not in keys
    assert keys[0] == keys[1] != keys[2]
    assert graph_key(gm, functions=outside_functions([made(wanted=object())])) is None


class WithoutRepr(ir.passes.InPlacePass):
    def __init__(self) -> None:
        self.what = object()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, modified=False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Negate, r"takes an instance .* \(did you mean Negate\(\)\?\)$"),
        (list, "'list'>$"),
        (WithoutRepr(), "frozen dataclass"),
    ],
)
def test_a_pass_without_an_instance_or_a_key_is_refused(given: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        ort_dynamo.register_pass(given)


@dataclass(frozen=True)
class Fails(PassBase):
    """Raises an error."""

    def call(self, graph_module: GraphModule) -> PassResult:
        raise KeyError("lost")


def test_the_graph_of_a_program_s_fx_pass_that_fails_is_in_the_folder_of_save_onnx(tmp_path: Path) -> None:
    options = {"extra_passes": [Fails()], "save_onnx": str(tmp_path), "debug": {"verify": True}}
    with pytest.raises(BackendCompilerFailed, match=r"as the pass was given it, is in .*failed_Fails\.txt"):
        torch.compile(magnitude, backend="ort_train", options=options)(torch.ones(3))
    assert "aten.abs" in (tmp_path / "failed_Fails.txt").read_text()
