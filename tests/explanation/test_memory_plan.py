"""ort_dynamo.memory_plan: the table of plans of a model."""

from __future__ import annotations

import html
import logging
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from ort_dynamo import MemoryPlan, memory_plan
from ort_dynamo.errors import UnknownOptionError
from ort_dynamo.passes.fx.analysis.operator_names import NAMES
from ort_dynamo.torch_internals.tracing import dry_run


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.5)).sum()


def test_the_table_reads_as_a_table() -> None:
    (text,) = [str(memory_plan(Mlp(), torch.randn(3, 4)))]
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["recompute_plan", "times", "fewer", "bytes", "of", "saved", "extra", "time"],
        ["Gelu+Dropout+:1:-1", "1", "192", "44.4%", "57.5%"],
        ["Gemm+:1:-1", "1", "192", "44.4%", "20.3%"],
    ]
    assert text.splitlines()[0] == (
        "Graph 1 of 1: 432 bytes saved for the backward in 3 tensors; "
        "predicted peak 816 bytes in the forward, 1,284 in the backward"
    )


def test_a_symbolic_batch_makes_symbolic_bytes_beside_those_of_the_example() -> None:
    (graph,) = memory_plan(Mlp(), torch.randn(3, 4), dynamic=True).graphs
    row = graph.rows[0]
    (symbol,) = row.size.free_symbols
    assert row.size == 64 * symbol
    assert row.nbytes == 64 * 3
    assert graph.record.size == (2 * 64 + 16) * symbol
    assert f"64*{symbol}" in str(graph)


def test_every_graph_between_breaks_has_its_table() -> None:
    def function(x: Tensor) -> Tensor:
        x = F.gelu(x).exp()
        torch._dynamo.graph_break()
        return x.sin().tanh().sum()

    plan = memory_plan(function, torch.randn(4, 4, requires_grad=True))
    assert len(plan.graphs) == 2
    assert "Graph 2 of 2: " in str(plan)
    assert repr(plan) == str(plan)
    assert plan._repr_html_() == f"<pre>{html.escape(str(plan))}</pre>"


def test_a_model_without_a_backward_has_no_table() -> None:
    plan = memory_plan(lambda x: x.exp(), torch.randn(3))
    assert plan == MemoryPlan(())
    assert str(plan) == "No graph of this model has a backward: no tensor is saved."


def test_the_tables_do_not_depend_on_the_options_and_the_record_does() -> None:
    x = torch.randn(3, 4)
    (plain,) = memory_plan(Mlp(), x).graphs
    (planned,) = memory_plan(Mlp(), x, options={"recompute_plan": "Gelu+Dropout+:1:-1"}).graphs
    assert planned.rows == plain.rows
    assert planned.record.nbytes == plain.record.nbytes - plain.rows[0].nbytes == planned.record.nbytes_without - 192


def test_buffers_generators_and_gradients_are_as_before() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    memory_plan(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_modules_optimizers_and_inputs_of_a_function_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before = {name: one.clone() for name, one in model.state_dict().items()}

    def step(x: Tensor) -> Tensor:
        loss = model(x.mul_(2)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.ones(5, 4)
    assert memory_plan(step, x).graphs
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(x, torch.ones(5, 4))
    assert not optimizer.state


def test_a_compiled_module_stands_for_the_module_in_it() -> None:
    model = Mlp()
    x = torch.randn(3, 4)
    assert memory_plan(torch.compile(model, backend="ort_train"), x) == memory_plan(model, x)


def test_gradients_need_not_be_enabled_where_it_is_called() -> None:
    with torch.no_grad():
        assert memory_plan(Mlp(), torch.randn(3, 4)).graphs


def test_a_compiled_graph_says_the_same_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model, x, options = Mlp(), torch.randn(3, 4), {"recompute_plan": "Gelu+Dropout+:1:-1"}
    with caplog.at_level(logging.INFO, logger="ort_dynamo.compilation.cut"):
        torch.compile(model, backend="ort_train", options=options)(x)
    (graph,) = memory_plan(model, x, options=options).graphs
    assert [record.getMessage() for record in caplog.records if record.name == "ort_dynamo.compilation.cut"] == [
        graph.record.summary()
    ]


class WritesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        ctx.count = count
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.count.add_(gradients[0])
        return gradients[0] * 2, None


def own_backward_writes(x: Tensor, other: Tensor) -> Tensor:
    return (WritesBackward.apply(x.sin(), other) * other.shape[0]).cos()  # type: ignore[no-untyped-call]


def storage_is_replaced(x: Tensor, other: Tensor) -> Tensor:
    other.data = x.detach() * 2
    return (x.sin() * other).cos()


def number_is_random(x: Tensor, other: Tensor) -> Tensor:
    drawn = random.uniform(1, 2)
    return (x.double() * drawn).sin() * (x * drawn).cos()


def resize_is_whole(x: Tensor, other: Tensor) -> Tensor:
    return F.interpolate(x.sin()[None, None], size=7, mode="linear").cos()


def written_without_gradient(x: Tensor, other: Tensor) -> Tensor:
    product = x * 3
    with torch.no_grad():
        product.mul_(2)
        other.mul_(2)
    return product.sin() * other


@pytest.mark.parametrize(
    "function",
    [own_backward_writes, storage_is_replaced, number_is_random, resize_is_whole, written_without_gradient],
    ids=lambda f: f.__name__,
)
def test_a_plan_is_of_the_graph_that_the_backend_captures(
    function: Callable[..., Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    def inputs() -> tuple[Tensor, Tensor]:
        return torch.linspace(-1, 1, 3).requires_grad_(), torch.linspace(0, 1, 3)

    with caplog.at_level(logging.INFO, logger="ort_dynamo.compilation.cut"):
        torch.compile(function, backend="ort_train", fullgraph=True)(*inputs())
    logged = [record.getMessage() for record in caplog.records if record.name == "ort_dynamo.compilation.cut"]
    (graph,) = memory_plan(function, *inputs()).graphs
    assert logged == [graph.record.summary()]


def test_an_input_written_to_without_gradient_keeps_its_own() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)
        return x.sin()

    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 3
    made_by = x.grad_fn
    memory_plan(function, x)
    assert x.grad_fn is made_by


def test_unknown_options_are_refused() -> None:
    with pytest.raises(UnknownOptionError):
        memory_plan(Mlp(), torch.randn(3, 4), options={"recompute_plans": "Gelu+:1:1"})


def test_the_worked_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/how_to/save_memory.md").read_text()
    plans = text.split("## Plans", 1)[1]
    code, shown = (plans.split(fence, 1)[1].split("```", 1)[0] for fence in ("```python\n", "```text\n"))
    exec(compile(code, "docs/how_to/save_memory.md", "exec"), {})
    assert capsys.readouterr().out == shown


def test_every_operator_name_is_documented_with_its_overloads() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/how_to/save_memory.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (`.+`) \|$", text, re.MULTILINE))
    assert rows == {name: ", ".join(f"`{aten}`" for aten in atens) for name, atens in NAMES.items()}


def test_a_sparse_gradient_is_counted_by_its_values() -> None:
    def backward_peak(sparse: bool) -> int:
        table = torch.nn.Embedding(1000, 4, sparse=sparse)
        (graph,) = memory_plan(lambda ids: table(ids).square().sum(), torch.tensor([1, 2, 2])).graphs
        return graph.record.backward_peak

    values = 4 * 3 * 4  # its indices are the input's
    assert values <= backward_peak(sparse=True) < 1000 * 4 * 4 <= backward_peak(sparse=False)


@pytest.mark.skipif(not dry_run._ISOLATES, reason="torch before 2.13 cannot keep entries apart")
@pytest.mark.parametrize("broken", [False, True])
def test_the_program_stays_compiled_and_static(broken: bool) -> None:
    class Subject(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = F.gelu(self.up(x))
            if broken:
                torch._dynamo.graph_break()
            return self.down(hidden)

    model, graphs = Subject(), 2 if broken else 1
    compiled = torch.compile(model, backend="ort_train")
    counters.clear()
    compiled(torch.randn(5, 4)).sum().backward()
    for rows in range(6, 20):
        assert len(memory_plan(model, torch.randn(rows, 4)).graphs) == graphs
    compiled(torch.randn(5, 4)).sum().backward()
    assert counters["ort_train"]["graphs"] == 2 * graphs, "it was compiled anew"
    static = torch.compile(model, backend="ort_train", fullgraph=not broken)
    static(torch.randn(5, 4))
    assert counters["ort_train"]["graphs"] == 2 * graphs
    compiled(torch.randn(7, 4)).sum().backward()
    assert counters["ort_train"]["graphs"] == 4 * graphs, "another size is another graph, as if no plan had been made"
    compiled(torch.randn(9, 4)).sum().backward()
    assert counters["ort_train"]["graphs"] == 4 * graphs, "and that graph is dynamic"


@pytest.mark.skipif(not dry_run._ISOLATES, reason="torch before 2.13 cannot keep entries apart")
def test_a_plan_before_training_leaves_the_first_compile_static() -> None:
    model = Mlp()
    memory_plan(model, torch.randn(3, 4))
    seen: list[bool] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(5, 4))
    assert seen == [False]
