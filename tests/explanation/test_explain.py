"""ort_dynamo.explain tells where operators run, and how much memory they take."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from explained import Mlp, broken, image_net
from torch import Tensor, nn

import ort_dynamo
from ort_dynamo import Explanation, explain
from ort_dynamo.errors import InvalidArgumentError, UnknownOptionError
from ort_dynamo.explanation.data import Operator
from ort_dynamo.explanation.groups import By, saved_by, step, time_by


def operators(explanation: Explanation) -> list[Operator]:
    return [one for graph in explanation.graphs for role in graph.roles for one in role.operators]


def test_an_mlp_runs_in_onnx_runtime_but_for_its_random_numbers() -> None:
    found = explain(Mlp(), torch.randn(3, 4))
    (graph,) = found.graphs
    forward, backward = graph.roles
    assert (forward.name, backward.name) == ("forward", "backward")
    assert forward.count("native")
    assert backward.count("native")
    assert [one.place for one in found.outside] == ["by_design"]
    assert {one.module for one in forward.operators if one.overload == "aten.addmm.default"} == {"up", "down"}
    assert [one.operators for one in forward.islands] == [forward.count("native")]
    assert sum(forward.islands[0].onnx_nodes.values()) > 0
    assert "test_explain" not in graph.function
    assert "explained.py" in graph.function


def test_counts_agree_with_the_summary_of_the_compiled_model() -> None:
    found = explain(Mlp(), torch.randn(3, 4))
    torch.compile(Mlp(), backend="ort_train")(torch.randn(3, 4)).backward()
    real = ort_dynamo.summary()
    assert real.modules == found.summary.modules
    assert real.native.total() == sum(one.place == "native" for one in operators(found))
    assert (real.graphs, real.native, real.by_design) == (
        found.summary.graphs,
        found.summary.native,
        found.summary.by_design,
    )


def test_memory_is_that_of_the_memory_plan() -> None:
    model, x = Mlp(), torch.randn(3, 4)
    (plan,) = ort_dynamo.memory_plan(model, x).graphs
    found = explain(model, x)
    (graph,) = found.graphs
    assert graph.saved_bytes == plan.record.nbytes == sum(one.amount for one in found.saved)
    assert [role.peak for role in graph.roles] == [plan.record.forward_peak, plan.record.backward_peak]
    assert [one.nbytes for one in graph.saved] == sorted((one.nbytes for one in plan.record.saved), reverse=True)


def test_recomputed_operators_have_the_pass_that_decided_it() -> None:
    (graph,) = explain(Mlp(), torch.randn(3, 4), options={"recompute_plan": "Gelu+Dropout+:1:-1"}).graphs
    assert any("gelu" in name for name in graph.recomputed)
    assert graph.saved_bytes < graph.nbytes_without
    again = {one.recomputed for one in graph.roles[1].operators if "gelu.default" in one.overload}
    assert again == {"recompute_plan"}


def test_a_fallback_and_a_break_are_told_with_their_lines() -> None:
    found = explain(broken, torch.randn(4, 8), torch.randn(8, 8, requires_grad=True))
    assert len(found.graphs) == 2
    (note,) = found.summary.breaks
    assert "graph break" in note.reason
    assert note.where.endswith("explained.py:21")
    fallbacks = [one for one in found.outside if one.place == "eager"]
    assert {one.overload for one in fallbacks if one.role == "forward"} == {
        "aten._fft_r2c.default",
        "aten.view_as_real.default",
    }
    assert all("complex64" in one.reason and "torch.fft.fft" in one.lines[0] for one in fallbacks)
    assert all("register_lowering" in one.change for one in fallbacks)


def test_placement_is_told_with_the_option_that_changes_it() -> None:
    model, x = image_net(), torch.randn(2, 3, 8, 8)
    found = explain(model, x)
    assert {one.place for one in found.outside} == {"chosen"}
    assert {one.change for one in found.outside} == {'options={"placement": "onnxruntime"}'}
    inside = explain(model, x, options={"placement": "onnxruntime"})
    assert not inside.outside
    assert inside.options == {"placement": "onnxruntime"}


def test_fallbacks_are_told_where_the_option_refuses_them() -> None:
    found = explain(lambda x: torch.fft.fft(x).real, torch.randn(4), options={"fallback": "error"})
    assert any(one.place == "eager" for one in found.outside)


def test_a_model_without_gradients_has_one_graph() -> None:
    with torch.no_grad():
        (graph,) = explain(Mlp().eval(), torch.randn(3, 4)).graphs
    assert [role.name for role in graph.roles] == ["inference"]
    assert graph.peak > 0
    assert not graph.saved


def test_a_symbolic_size_is_told_in_symbols() -> None:
    (graph,) = explain(Mlp(), torch.randn(3, 4), dynamic=True).graphs
    results = [one.result for role in graph.roles for one in role.operators]
    assert any("s" in result.partition("[")[2] for result in results)


def test_a_compiled_model_is_explained_with_its_options() -> None:
    x = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(image_net(), backend="ort_train", options={"placement": "onnxruntime"})
    assert not explain(compiled, x).outside
    in_place = image_net()
    in_place.compile(backend="ort_train", options={"placement": "onnxruntime"})
    assert not explain(in_place, x).outside
    function = torch.compile(image_net().forward, backend="ort_train", options={"placement": "onnxruntime"})
    assert not explain(function, x).outside


@pytest.mark.parametrize("beside", [{"options": {}}, {"mode": "max-autotune"}, {"dynamic": True}])
def test_options_beside_those_of_a_compiled_model_are_refused(beside: dict[str, Any]) -> None:
    compiled = torch.compile(Mlp(), backend="ort_train")
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(beside))}=.*none for a compiled model, which has its"):
        explain(compiled, torch.randn(3, 4), **beside)


def test_a_model_of_another_backend_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="backend"):
        explain(torch.compile(Mlp(), backend="eager"), torch.randn(3, 4))


@pytest.mark.parametrize("function", [ort_dynamo.explain, ort_dynamo.memory_plan, ort_dynamo.verify])
@pytest.mark.parametrize("model", [None, 3, torch.ones(2)])
def test_a_model_that_cannot_be_called_is_refused(function: Callable[..., Any], model: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot take model=.*: expected a module or a function"):
        function(model, torch.ones(2))


@pytest.mark.parametrize("function", [ort_dynamo.explain, ort_dynamo.memory_plan, ort_dynamo.verify])
def test_example_inputs_are_asked_for(function: Callable[..., Any]) -> None:
    for model in (Mlp(), torch.compile(Mlp(), backend="ort_train")):
        with pytest.raises(InvalidArgumentError, match=rf"example inputs, as in {function.__name__}\(model.*'x'"):
            function(model)
    function(lambda: torch.ones(3).exp())


def test_unknown_options_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match="placement"):
        explain(Mlp(), torch.randn(3, 4), options={"placment": "onnxruntime"})


def test_keyword_arguments_are_those_of_the_call() -> None:
    def scaled(x: Tensor, *, options: float, bias: float) -> Tensor:
        return x.sin() * options + bias

    (graph,) = explain(scaled, torch.randn(3), kwargs={"options": 2.0}, bias=1.0).graphs
    assert "aten.sin.default" in {one.overload for role in graph.roles for one in role.operators}


def test_a_function_without_operators_has_no_graph() -> None:
    found = explain(lambda x: x, torch.randn(3))
    assert not found.graphs
    assert str(found) == "<lambda>: nothing was compiled by ort_train"


def test_earlier_recompiles_are_told_with_their_guard() -> None:
    def scaled(x: Tensor, factor: int) -> Tensor:
        return x.sin() * factor

    compiled = torch.compile(scaled, backend="ort_train", dynamic=False)
    for factor in (2, 3):
        compiled(torch.randn(3), factor)
    (note,) = explain(compiled, torch.randn(3), 4).summary.recompiles
    assert "factor" in note.reason


def test_passes_record_their_changes_to_the_graph() -> None:
    (graph,) = explain(Mlp(), torch.randn(3, 4)).graphs
    runs = [*graph.passes, *(run for role in graph.roles for run in role.passes)]
    assert {"joint graph", "forward", "backward", "island_0"} == {run.on for run in runs}
    assert all(run.before == run.after for run in runs if not run.modified)
    (hoisted,) = [run for run in runs if run.name == "HoistRandom"]
    assert hoisted.modified
    assert hoisted.before != hoisted.after
    assert sum(after - before for _, before, after in hoisted.operators) == hoisted.after - hoisted.before
    assert not any(run.operators for run in runs if not run.modified)


def test_a_compile_is_told_by_stages() -> None:
    (graph,) = explain(Mlp(), torch.randn(3, 4)).graphs
    assert {"capture", "mark and partition", "segment", "lower", "rewrite", "open"} <= graph.stages.keys()
    assert all(seconds >= 0 for seconds in graph.stages.values())


def test_the_second_explanation_finds_the_sessions_of_the_first() -> None:
    model, x = Mlp(), torch.randn(3, 4)
    first, second = ([role.islands[0].source for role in explain(model, x).graphs[0].roles] for _ in range(2))
    assert (first, second) == (["built", "built"], ["memory", "memory"])


def test_the_cache_on_disk_is_told(tmp_path: Path) -> None:
    options = {"cache": str(tmp_path)}
    first, second = (explain(Mlp(), torch.randn(3, 4), options=options) for _ in range(2))
    torch.compiler.reset()
    third = explain(Mlp(), torch.randn(3, 4), options=options)
    islands = [found.graphs[0].roles[0].islands[0] for found in (first, second, third)]
    assert [(one.source, one.miss) for one in islands] == [("built", "absent"), ("memory", ""), ("disk", "")]
    assert islands[0].stored_at
    assert third.cache == str(tmp_path)
    assert not explain(Mlp(), torch.randn(3, 4), options={"cache": False}).cache


def test_casts_are_counted() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        (graph,) = explain(Mlp(), torch.randn(3, 4)).graphs
    assert graph.roles[0].casts["float32 to bfloat16"] > 0
    nested = torch.vmap(torch.vmap(lambda row: row.sin() * 2))  # casts a number to a tensor
    (graph,) = explain(nested, torch.randn(3, 4)).graphs
    assert not graph.roles[0].casts


def test_the_text_is_one_screen() -> None:
    for found in (
        explain(Mlp(), torch.randn(3, 4)),
        explain(broken, torch.randn(4, 8), torch.randn(8, 8, requires_grad=True), measure=True),
        explain(image_net(), torch.randn(2, 3, 8, 8)),
    ):
        lines = str(found).splitlines()
        assert len(lines) <= 60
        assert max(map(len, lines)) <= 100
        assert repr(found) == str(found)


def test_data_is_json() -> None:
    found = explain(broken, torch.randn(4, 8), torch.randn(8, 8, requires_grad=True))
    data = json.loads(json.dumps(found.to_dict()))
    assert [role["name"] for role in data["graphs"][0]["roles"]] == ["forward", "backward"]
    assert data["summary"]["breaks"][0]["function"] == "broken"


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.mark.parametrize("gradients", [True, False])
def test_measured_times_reach_sessions_and_operators(gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        found = explain(Deep(), torch.randn(8, 4), measure=True)
    assert found.measured is not None
    assert (found.measured.backward is not None) == gradients
    assert 0 < found.measured.sessions < found.measured.step
    timed = {one.module for one in operators(found) if one.seconds is not None and one.overload == "aten.addmm.default"}
    assert timed == {"layers.0", "layers.1", "layers.2"}
    for role in found.graphs[0].roles:
        assert all(island.measured and island.nodes for island in role.islands)
    assert found.times[0].amount >= found.times[-1].amount


def test_measured_times_reach_operators_whose_session_was_there_before() -> None:
    model, x = Deep(), torch.randn(8, 4)
    torch.compile(model, backend="ort_train")(x)
    found = explain(model, x, measure=True)
    assert {island.source for role in found.graphs[0].roles for island in role.islands} == {"memory"}
    assert any(one.seconds is not None for one in operators(found))


def test_times_are_none_without_measuring() -> None:
    found = explain(Deep(), torch.randn(8, 4))
    assert found.measured is None
    assert not found.times
    assert all(one.seconds is None for one in operators(found))


def test_sums_by_operator_class_and_module_agree() -> None:
    found = explain(Deep(), torch.randn(8, 4), measure=True)
    for shares in (saved_by, time_by):
        every: list[By] = ["operator", "class", "module"]
        totals = [sum(one.amount for one in shares(found.graphs, by)) for by in every]
        assert totals == pytest.approx([totals[0]] * 3)
        assert totals[0] > 0
    assert {"layers.0", "layers.1", "layers.2"} <= {one.name for one in time_by(found.graphs, "module")}


def test_the_memory_of_a_step_has_the_saved_tensors_of_earlier_graphs() -> None:
    w = torch.randn(8, 8, requires_grad=True)
    found = explain(broken, torch.randn(4, 8), w)
    first, second = found.graphs
    moments = step(found.graphs, found.calls)
    assert [name for name, _ in itertools.groupby(one.role for one in moments)] == ["forward", "backward"]
    ahead = len(first.roles[0].operators)
    assert moments[ahead].alive == second.roles[0].operators[0].alive + first.saved_bytes
    assert moments[-1].alive == first.roles[1].operators[-1].alive
    assert found.peak == max(one.alive for one in moments)


class Broken(nn.Module):
    """A block with a graph break, so that all blocks share two graphs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        torch._dynamo.graph_break()
        return x + torch.tanh(self.down(h))


def saved_by_a_call(function: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> int:
    """Count the bytes that autograd saves, without those of parameters and of the input."""
    given = {one.untyped_storage().data_ptr() for one in (*model.parameters(), x)}
    kept: dict[int, torch.Tensor] = {}

    def pack(one: torch.Tensor) -> torch.Tensor:
        if (place := one.untyped_storage().data_ptr()) not in given:
            kept[place] = one
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        result = function(x)
    del result
    return sum(one.untyped_storage().nbytes() for one in kept.values())


def test_a_graph_that_runs_for_each_layer_counts_for_each() -> None:
    model, x = nn.Sequential(*[Broken(8) for _ in range(4)]), torch.randn(16, 8)
    found = explain(model, x)
    compiled = torch.compile(model, backend="ort_train")
    compiled(x)
    assert len(found.calls) == 8
    assert found.saved_bytes == saved_by_a_call(compiled, model, x)
    assert found.peak > found.saved_bytes > found.graphs[0].saved_bytes
    assert "memory in a step with 8 calls of graphs: " in str(found)


def test_a_graph_without_gradients_counts_once() -> None:
    model, x = nn.Sequential(*[Broken(8) for _ in range(4)]), torch.randn(16, 8)
    with torch.no_grad():
        found = explain(model, x)
    assert [one.saved for one in found.calls] == [0, 0]
    assert found.peak > 0


@pytest.mark.parametrize("retains", [False, True])
def test_memory_that_a_second_backward_needs_counts_in_the_next_step(retains: bool) -> None:
    made, judge = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(16, 8)

    def step(x: torch.Tensor) -> None:
        fake = made(x)
        torch._dynamo.graph_break()
        if retains:
            fake.sum().backward(retain_graph=True)
        else:
            judge(fake.detach()).sum().backward()
        torch._dynamo.graph_break()
        judge(fake).sum().backward()

    found = explain(step, x)
    result = 16 * 8 * 4  # what tanh saves; the input of the judge is the same memory as the result of the other
    assert [one.saved for one in found.calls] == [result, result]


def test_arguments_of_a_compile_may_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning puts a function in place of torch.compile, and copies its arguments."""
    compile_ = torch.compile

    def copying(model: Any, **arguments: Any) -> Any:
        return compile_(model, **copy.deepcopy(arguments))

    monkeypatch.setattr(torch, "compile", copying)
    found = explain(Mlp(), torch.randn(3, 4))
    assert [len(graph.roles) for graph in found.graphs] == [2]
    assert found.calls
    assert ort_dynamo.verify(Mlp(), torch.randn(3, 4)).ok
    assert ort_dynamo.memory_plan(Mlp(), torch.randn(3, 4)).graphs


def test_a_saved_dropout_mask_has_the_programs_name() -> None:
    names = [one.name for one in explain(Mlp(), torch.randn(3, 4)).saved]
    assert "random numbers of dropout" in names
