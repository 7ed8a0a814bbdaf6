"""Tests of the record of each pass, and of the checks after it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.errors import PassBrokeGraphError, PassFailedError
from ort_dynamo.passes.fx.remove_no_ops import RemoveNoOps
from ort_dynamo.passes.onnx.cast_propagation.propagate_casts import PropagateCasts
from ort_dynamo.passes.onnx.fold_casts import FoldCasts
from ort_dynamo.passes.running import run_passes
from ort_dynamo.torch_internals.fakes import storage_identity


def fx_graph() -> GraphModule:
    return make_fx(lambda x: (x + 1).clone() * 2, tracing_mode="fake")(torch.ones(2, 3))


def model() -> ir.Model:
    return ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 20]>\n'
        "g (float[2] x) => (float[2] z) { y = Neg (x) w = Cast <to = 10> (y) v = Cast <to = 1> (w) z = Abs (v) }"
    )


@dataclass(frozen=True)
class Change(PassBase):
    """Does anything to an FX graph."""

    change: Callable[[GraphModule], object]

    def __repr__(self) -> str:
        return "Change()"

    def call(self, graph_module: GraphModule) -> PassResult:
        self.change(graph_module)
        return PassResult(graph_module, True)


@dataclass(frozen=True)
class ChangeModel(ir.passes.InPlacePass):
    """Does anything to a model."""

    change: Callable[[ir.Model], object]

    def __repr__(self) -> str:
        return "ChangeModel()"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self.change(model)
        return ir.passes.PassResult(model, True)


def test_each_pass_has_a_record_in_order() -> None:
    first, second = run_passes([RemoveNoOps(), RemoveNoOps()], fx_graph())
    assert (first.name, first.modified, first.summary) == ("RemoveNoOps(name='remove_no_ops')", True, None)
    assert not second.modified
    assert first.seconds > second.seconds > 0


def test_a_run_records_a_pass_by_its_summary_and_a_foreign_pass_by_its_class() -> None:
    graph = model()
    casts, unused = run_passes([PropagateCasts(), RemoveUnusedNodesPass()], graph, check=True)
    assert str(casts.summary).startswith("2 casts became ")
    assert casts.name.startswith("PropagateCasts(strategy=")
    assert (unused.name, unused.summary) == ("RemoveUnusedNodesPass", None)


def drop_value(gm: GraphModule) -> None:
    del next(node for node in gm.graph.nodes if node.op == "call_function").meta["val"]


def transpose(gm: GraphModule) -> None:
    """Change the operator, and leave its fake value."""
    *_, product, _ = gm.graph.nodes
    product.target, product.args = torch.ops.aten.t.default, (product.args[0],)


def lie_about_a_shape(gm: GraphModule) -> None:
    (product,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    with product.graph.inserting_before(product):
        unread = product.graph.call_function(keeping, (product.args[0],))
        read = product.graph.call_function(torch.ops.aten.neg.default, (unread,))
    with product.args[0].meta["val"].fake_mode:
        unread.meta["val"], read.meta["val"] = torch.empty(2, 3), torch.empty(2, 3)
        product.args[0].meta["val"] = torch.empty(3, 2)


def lie_about_memory(gm: GraphModule) -> None:
    (product,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    product.meta["val"] = product.args[0].meta["val"]


def keeping(value: object) -> object:
    return value


keeping.keeps_value = True  # type: ignore[attr-defined]


def read_too_early(gm: GraphModule) -> None:
    *_, product, _ = gm.graph.nodes
    next(iter(gm.graph.nodes)).append(product)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (drop_value, "add"),
        (read_too_early, "before it has been defined"),
        (transpose, "output 0 was .*'2', '3'.* and is .*'3', '2'"),
        (lie_about_a_shape, "has the value .*'3', '2'.*, and its call gives .*'2', '3'"),
        (lie_about_memory, "has a value in the memory of"),
    ],
    ids=["a lost value", "not in a topological order", "another output", "a wrong shape", "a wrong allocation"],
)
def test_an_fx_pass_that_breaks_the_graph_is_named(change: Callable[[GraphModule], None], what: str) -> None:
    with pytest.raises(PassBrokeGraphError, match=what) as caught:
        run_passes([RemoveNoOps(), Change(change), RemoveNoOps()], fx_graph(), check=True)
    assert str(caught.value).startswith("Change() left an invalid FX graph: ")
    run_passes([Change(change)], fx_graph())  # nothing is checked unless it is asked for


def test_fake_values_are_propagated_after_a_pass() -> None:
    def change(gm: GraphModule) -> None:
        (addition,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        with gm.graph.inserting_after(addition):
            sliced = gm.graph.call_function(torch.ops.aten.slice.Tensor, (addition, 1, 0, 2))
        addition.replace_all_uses_with(sliced, lambda user: user is not sliced)

    gm = fx_graph()
    run_passes([Change(change)], gm)
    values = {node.name: node.meta["val"] for node in gm.graph.nodes if node.op == "call_function"}
    assert {name: tuple(value.shape) for name, value in values.items()} == {
        "add": (2, 3),
        "slice_tensor": (2, 2),
        "clone": (2, 2),
        "mul": (2, 2),
    }
    assert storage_identity(values["slice_tensor"]) == storage_identity(values["add"])


def raise_error(graph: object) -> None:
    raise KeyError("x")


@pytest.mark.parametrize("check", [False, True])
def test_a_pass_that_raises_is_named_and_its_graph_is_saved(tmp_path: Path, check: bool) -> None:
    for graph, pass_ in ((fx_graph(), Change(raise_error)), (model(), ChangeModel(raise_error))):
        with pytest.raises(PassFailedError, match=r"Change(Model)?\(\) failed: KeyError: 'x'") as caught:
            run_passes([pass_], graph, check=check, folder=str(tmp_path))
        assert isinstance(caught.value.__cause__, KeyError)
        when = "was given it" if check else "left it"
        assert re.search(rf"\nThe graph, as the pass {when}, is in {tmp_path}/failed_\w+\.txt\.$", str(caught.value))
    assert "clone" in (tmp_path / "failed_Change.txt").read_text(encoding="utf-8")
    assert "Cast" in (tmp_path / "failed_ChangeModel.txt").read_text(encoding="utf-8")


def test_an_error_without_a_folder_tells_how_to_see_the_graph() -> None:
    with pytest.raises(PassFailedError, match=r"\nTo see the graph, run with TORCH_LOGS=\+ort_dynamo, or set options="):
        run_passes([Change(raise_error)], fx_graph())


class _ReturnsNothing(PassBase):
    def call(self, graph_module: GraphModule) -> None:
        pass


def test_an_fx_pass_that_returns_nothing_is_told_the_result() -> None:
    with pytest.raises(PassFailedError, match=r"TypeError: call\(\) returned None, .* return PassResult\(") as caught:
        run_passes([_ReturnsNothing()], fx_graph())
    assert isinstance(caught.value.__cause__, TypeError)


class _ReturnsACopy(PassBase):
    def call(self, graph_module: GraphModule) -> PassResult:
        return PassResult(copy.deepcopy(graph_module), True)


def test_an_fx_pass_that_returns_another_graph_is_told_so() -> None:
    with pytest.raises(PassFailedError, match=r"TypeError: call\(\) returned another graph: change the one"):
        run_passes([_ReturnsACopy()], fx_graph())


def add_placeholder(gm: GraphModule) -> None:
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("more")


def drop_result(gm: GraphModule) -> None:
    (output,) = gm.graph.find_nodes(op="output")
    output.args = ((),)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(add_placeholder, "had 1 inputs, and has 2"), (drop_result, "had 1 outputs, and has 0")],
    ids=["an input", "an output"],
)
def test_an_fx_pass_that_adds_or_drops_ends_is_named(change: Callable[[GraphModule], None], reason: str) -> None:
    with pytest.raises(PassFailedError, match=rf"The pass Change\(\) failed: ValueError: the graph {reason}"):
        run_passes([Change(change)], fx_graph())


def swap_inputs(model: ir.Model) -> None:
    model.graph.inputs.reverse()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (swap_inputs, "the inputs a, b are at other places"),
        (lambda model: model.graph.inputs.pop(), "the graph had 2 inputs, and has 1"),
        (lambda model: model.graph.outputs.append(model.graph.inputs[0]), "the graph had 1 outputs, and has 2"),
    ],
    ids=["inputs in another order", "an input", "an output"],
)
def test_a_pass_that_changes_the_ends_of_a_model_is_named(change: Callable[[ir.Model], object], reason: str) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]>\ng (float[2] a, float[2] b) => (float[2] c) { c = Sub (a, b) }'
    with pytest.raises(PassFailedError, match=rf"The pass ChangeModel\(\) failed: ValueError: {reason}"):
        run_passes([ChangeModel(change)], ir.from_onnx_text(text))


def test_nodes_that_had_no_value_before_may_go_without() -> None:
    gm = fx_graph()
    drop_value(gm)
    (record,) = run_passes([Change(lambda gm: None)], gm, check=True)
    assert record.name == "Change()"


def unknown_operator(model: ir.Model) -> None:
    model.graph.node(0).op_type = "Nonsense"


def reverse(model: ir.Model) -> None:
    nodes = list(model.graph)
    model.graph.remove(nodes)
    model.graph.extend(reversed(nodes))


def output_of_nothing(model: ir.Model) -> None:
    model.graph.outputs[0] = ir.Value(name="nothing", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (unknown_operator, "Nonsense"),
        (reverse, "topologically sorted"),
        (output_of_nothing, "nothing makes the output nothing"),
    ],
    ids=["an unknown operator", "not in a topological order", "an output without a node"],
)
def test_a_pass_that_breaks_a_model_is_named(change: Callable[[ir.Model], None], what: str) -> None:
    with pytest.raises(PassBrokeGraphError, match=what) as caught:
        run_passes([FoldCasts(), ChangeModel(change), FoldCasts()], model(), check=True)
    assert str(caught.value).startswith("ChangeModel() left an invalid ONNX graph: ")
    run_passes([ChangeModel(change)], model())


def test_no_pass_is_blamed_for_a_graph_that_was_invalid_before() -> None:
    graph = model()
    reverse(graph)
    with pytest.raises(PassBrokeGraphError, match="what comes before the first pass left an invalid ONNX graph"):
        run_passes([FoldCasts()], graph, check=True)


class _ReturnsWhatIsInside(ir.passes.InPlacePass):
    """Returns a value that states neither type nor shape."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        (node,) = [node for node in model.graph if node.op_type == "Neg"]
        model.graph.outputs[0] = node.outputs[0]
        return ir.passes.PassResult(model, True)


def test_an_output_keeps_its_type_and_shape_when_another_value_takes_its_place() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[2] x) => (float[2] y) { a = Neg(x) y = Relu(a) }'
    )
    run_passes([_ReturnsWhatIsInside()], model, check=True)
    (output,) = model.graph.outputs
    assert (output.name, output.dtype, output.shape) == ("a", ir.DataType.FLOAT, ir.Shape([2]))


class _ReturnsWhatABranchReads(ir.passes.InPlacePass):
    """Makes a branch return a value of the graph around it."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        (branches,) = [node for node in model.graph if node.op_type == "If"]
        branches.attributes["then_branch"].as_graph().outputs[0] = model.graph.node(0).outputs[0]
        return ir.passes.PassResult(model, True)


def test_a_branch_that_returns_an_outer_value_is_refused() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 20]> g (bool p, float[2] x) => (float[2] y) {
            a = Neg(x)
            y = If(p) <
                then_branch = t () => (float[2] u) { u = Neg(a) }, else_branch = e () => (float[2] v) { v = Abs(a) }
            >
        }"""
    )
    with pytest.raises(PassBrokeGraphError, match="nothing makes the output a of t"):
        run_passes([_ReturnsWhatABranchReads()], model, check=True)
