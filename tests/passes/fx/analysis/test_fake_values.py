"""Fake values follow the calls of a graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo import passes
from ort_dynamo.passes.fx.analysis.fake_values import FakeValues, add_call, differences, looks_same, separate_memory
from ort_dynamo.torch_internals.fakes import storage_identity

aten = torch.ops.aten


def graph_of(function: Callable[..., Any], *inputs: Tensor, mode: str = "fake") -> tuple[GraphModule, dict[str, Node]]:
    gm = make_fx(function, tracing_mode=mode)(*inputs)
    return gm, {node.name: node for node in gm.graph.nodes}


def memory(node: Node) -> int:
    return storage_identity(node.meta["val"])


def test_a_change_ends_where_nothing_depends_on_it() -> None:
    gm, nodes = graph_of(lambda x: (x.sin() * 2).exp(), torch.ones(2, 3))
    before = {name: node.meta.get("val") for name, node in nodes.items()}
    values = FakeValues(gm)
    nodes["sin"].target = aten.cos.default
    values.update()
    assert all(node.meta.get("val") is before[name] for name, node in nodes.items())


def test_views_follow_a_copy_that_becomes_an_alias() -> None:
    gm, nodes = graph_of(lambda x: (x + 1).clone().t()[0].exp(), torch.ones(2, 3))
    values = FakeValues(gm)
    nodes["clone"].target = aten.alias.default
    assert [*differences(gm)]
    values.update()
    assert memory(nodes["add"]) == memory(nodes["clone"]) == memory(nodes["t"]) == memory(nodes["select"])
    assert memory(nodes["exp"]) != memory(nodes["add"])
    assert not [*differences(gm)]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("add", lambda val: val.double()),
        ("add", lambda val: val.new_empty(3, 2)),
        ("add", lambda val: val.new_empty(2, 3, 1)),
        ("add", lambda val: val.new_empty(3, 2).t()),
        ("select", lambda val: val.new_empty(6).as_strided((3,), (1,), 0)),
        ("sort", lambda val: (*val, val[0])),
        ("sort", lambda val: val[::-1]),
        ("sym_size", lambda val: val + 1),
        ("sym_size", lambda val: None),
    ],
)
def test_a_value_that_its_call_does_not_give_is_a_difference(name: str, change: Callable[[Any], Any]) -> None:
    gm, nodes = graph_of(lambda x: (aten.sort(x + 1), (x * 2)[1]), torch.ones(2, 3))
    with gm.graph.inserting_after(nodes["add"]):
        size = nodes["sym_size"] = gm.graph.call_function(aten.sym_size.int, (nodes["add"], 0))
    size.meta["val"] = 2
    assert not [*differences(gm)]
    with nodes["add"].meta["val"].fake_mode:
        nodes[name].meta["val"] = change(nodes[name].meta["val"])
    assert [*differences(gm)]


def test_the_memory_of_an_empty_value_is_no_difference() -> None:
    gm, _ = graph_of(torch.nn.functional.linear, torch.ones(0, 4, 3), torch.ones(5, 3), mode="symbolic")
    assert not [*differences(gm)]


def test_strides_follow_to_the_end() -> None:
    gm, nodes = graph_of(lambda x: x.clone().relu().sum(0), torch.ones(2, 3, 4, 5))
    values = FakeValues(gm)
    nodes["clone"].kwargs = {"memory_format": torch.channels_last}
    values.update()
    assert nodes["relu"].meta["val"].is_contiguous(memory_format=torch.channels_last)
    assert not [*differences(gm)]


def test_in_place_node_has_the_fake_value_of_its_argument() -> None:
    gm, nodes = graph_of(lambda x, y: (x + y).sin() * aten.threshold_backward(x + 1, y, 0), *[torch.ones(2, 3)] * 2)
    values = FakeValues(gm)
    gradient = nodes["threshold_backward"]
    gradient.target, gradient.kwargs = aten.threshold_backward.grad_input, {"grad_input": nodes["add_1"]}
    nodes["sin"].target = aten.sin_.default
    values.update()
    assert gradient.meta["val"] is nodes["add_1"].meta["val"]
    assert nodes["sin"].meta["val"] is nodes["add"].meta["val"]
    assert not [*differences(gm)]


def test_symbolic_sizes_stay_the_same_sizes() -> None:
    gm, nodes = graph_of(lambda x: x.sin().view(-1, 2).cos(), torch.ones(4, 6), mode="symbolic")
    values = FakeValues(gm)
    nodes["sin"].target = aten.tanh.default
    sizes = nodes["cos"].meta["val"].shape
    values.update()
    assert nodes["cos"].meta["val"].shape == sizes
    assert not [*differences(gm)]


def test_sizes_that_depend_on_data_stay_bound() -> None:
    def program(x: Tensor) -> Tensor:
        return x.nonzero() * 2

    kept: list[GraphModule] = []

    def backend(gm: GraphModule, inputs: Any) -> Any:
        from torch._functorch.aot_autograd import aot_module_simplified

        return aot_module_simplified(gm, inputs, fw_compiler=lambda gm, _: kept.append(gm) or gm)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(program, backend=backend)(torch.tensor([0.0, 1.0]))
    (gm,) = kept
    (found,) = gm.graph.find_nodes(op="call_function", target=aten.nonzero.default)
    before = found.meta["val"]
    values = FakeValues(gm)
    with gm.graph.inserting_before(found):
        (given,) = found.all_input_nodes
        found.args = (add_call(gm.graph, aten.neg.default, (given,)),)
    values.update()
    assert found.meta["val"] is before


def test_outputs_look_the_same_in_any_spelling_of_their_sizes() -> None:
    def function(x: Tensor) -> Any:
        size = x.shape[0]
        return (
            torch.empty_strided((2, 8, 1), (8, 1, size)),  # any stride of one element
            torch.empty_strided((2, 8, 1), (8, 1, 1)),
            torch.empty_strided((2, size), (size, 1)),
            torch.empty_strided((2, size * size // size), (size * size // size, 1)),
            torch.empty_strided((2, size), (1, 2)),
            torch.empty_strided((2, size + 1), (size + 1, 1)),
        )

    _, nodes = graph_of(function, torch.ones(5), mode="symbolic")
    one, other, square, spelled, turned, longer = (
        node.meta["val"] for node in nodes.values() if "empty_strided" in node.name
    )
    assert looks_same(one, other)
    assert looks_same(square, spelled)
    for different in (turned, longer, one, square.double(), 3, None):
        assert not looks_same(square, different)
    assert looks_same(turned, turned)


def test_a_partition_that_recomputes_one_of_two_results_gives_both_memory() -> None:
    def function(x: Tensor, saved: Tensor) -> Tensor:
        return aten.native_layer_norm(x, [3], None, None, 1e-5)[1] + saved.sum()

    gm, nodes = graph_of(function, torch.ones(2, 3), torch.ones(2, 3))
    nodes["saved_1"].meta["val"] = nodes["native_layer_norm"].meta["val"][0]  # as a partitioner leaves it
    separate_memory(gm)
    assert memory(nodes["saved_1"]) != storage_identity(nodes["native_layer_norm"].meta["val"][0])
    assert not [*differences(gm)]


def test_no_pass_writes_a_fake_value_by_hand() -> None:
    # Numbers are known by their expressions. A node that stands for another one has a copy of all of its meta.
    allowed = {"fake_values.py", "size_nodes.py"}
    folder = Path(passes.__path__[0]) / "fx"
    writes = re.compile(r"""meta\[["']val["']\]\s*=[^=]|["']val["']\s*:""")
    found = {path.name for path in folder.rglob("*.py") if writes.search(path.read_text(encoding="utf-8"))}
    assert found == allowed
