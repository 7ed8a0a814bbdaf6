"""What the summary says of graphs, nodes, graph breaks, skipped frames and recompiles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from traced_containers import dynamo_traces_its_own_containers

import ort_dynamo

HERE = str(Path(__file__))


def test_nothing_compiled_is_said() -> None:
    found = ort_dynamo.summary()
    assert (found.compiles, found.graphs, found.islands, found.native) == (0, 0, 0, Counter())
    assert str(found) == "ort_train: nothing was compiled"


def test_nodes_are_counted_by_where_they_run() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x * 2, 0.5) + torch.fft.fft(x).real

    torch.compile(function, backend="ort_train")(torch.randn(3))
    found = ort_dynamo.summary()
    assert (found.compiles, found.graphs) == (1, 1)
    assert found.native["aten.mul.Tensor"] >= 1
    assert found.by_design.total() == 1
    eager = found.eager[0]
    assert (eager.target, eager.count) == ("aten._fft_r2c.default", 1)
    assert HERE in eager.lines[0]
    text = str(found)
    assert f"nodes: {found.native.total()} in ONNX Runtime, 1 in torch by design, {found.eager_nodes} in eager" in text
    assert eager.reason in text


def test_a_session_that_serves_twice_is_a_hit_in_the_cache() -> None:
    for function in (lambda x: x.cos() * 3, lambda y: y.cos() * 3):
        torch.compile(function, backend="ort_train")(torch.ones(2))
    found = ort_dynamo.summary()
    assert (found.compiles, found.islands, found.cache_hits) == (2, 2, 1)


def test_a_graph_break_has_its_function_and_reason() -> None:
    def function(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(function, backend="ort_train")(torch.ones(2))
    found = ort_dynamo.summary()
    (one,) = found.breaks
    assert (one.function, one.where.split(":")[0]) == ("function", HERE)
    assert "graph_break()" in one.reason
    assert not found.skipped
    assert f"function ({one.where}): {one.reason}" in str(found)


def test_a_graph_break_before_the_first_operator_is_none_of_a_skipped_function() -> None:
    def function(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(function, backend="ort_train")(torch.ones(2))
    found = ort_dynamo.summary()
    assert ([one.function for one in found.breaks], found.skipped) == (["function"], ())


def test_a_function_that_only_hands_over_to_another_is_not_skipped() -> None:
    def inner(x: Tensor) -> Tensor:
        return x * 2

    def outer(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return inner(x)

    torch.compile(outer, backend="ort_train")(torch.ones(2))
    found = ort_dynamo.summary()
    assert ([one.function for one in found.breaks], found.skipped) == (["outer"], ())


def test_functions_of_one_name_are_told_apart() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.inner(x) * 2

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(x)[0]

    torch.compile(Outer(Inner()), backend="ort_train")(torch.ones(2, 1, 3))
    found = ort_dynamo.summary()
    (one,) = found.skipped
    assert "GRU" in one.reason
    lines = [int(note.where.rpartition(":")[2]) for note in (found.breaks[0], one)]
    assert lines == sorted(lines)


def test_a_recompile_has_the_guard_that_failed() -> None:
    compiled = torch.compile(lambda x, n: x * n, backend="ort_train")
    compiled(torch.ones(3), 2)
    compiled(torch.ones(3), 2.5)
    (one,) = ort_dynamo.summary().recompiles
    assert (one.function, one.where.split(":")[0]) == ("<lambda>", HERE)
    assert "n" in one.reason


def test_a_function_that_dynamo_gives_up_on_is_skipped() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    torch.compile(Model(), backend="ort_train")(torch.ones(2, 1, 3))
    found = ort_dynamo.summary()
    (one,) = found.skipped
    assert (one.function, one.where.split(":")[0]) == ("forward", HERE)
    assert "LSTM" in one.reason
    assert not found.breaks
    assert str(found).startswith("ort_train: nothing was compiled\nskipped by Dynamo")


def test_a_module_of_torch_itself_is_skipped_where_dynamo_leaves_it_out() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model.compile(backend="ort_train")
    model(torch.ones(1, 3))
    found = ort_dynamo.summary()
    if dynamo_traces_its_own_containers():
        assert (found.compiles, found.skipped) == (1, ())
        return
    (one,) = found.skipped
    assert one.function == "Sequential.forward"
    assert "torch.compile(module)" in one.reason


def test_a_module_compiled_for_another_backend_is_not_ours() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model.compile(backend="eager")
    model(torch.ones(1, 3))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert str(ort_dynamo.summary()) == "ort_train: nothing was compiled"


def test_a_reset_forgets() -> None:
    torch.compile(lambda x: x + 1, backend="ort_train")(torch.ones(2))
    torch._dynamo.reset()
    assert str(ort_dynamo.summary()) == "ort_train: nothing was compiled"


@pytest.mark.parametrize(("value", "lines"), [("1", 2), ("0", 0), (None, 0)])
def test_it_is_printed_at_exit_where_it_is_asked_for(value: str | None, lines: int) -> None:
    program = "import torch; torch.compile(lambda x: x + 1, backend='ort_train')(torch.ones(2))"
    environment = {name: text for name, text in os.environ.items() if name != "ORT_DYNAMO_SUMMARY"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment | ({} if value is None else {"ORT_DYNAMO_SUMMARY": value}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stderr.splitlines()) == lines, done.stderr
    assert lines == 0 or done.stderr.startswith("ort_train: compiles 1, graphs 1, islands 1 (0 from the cache)")
