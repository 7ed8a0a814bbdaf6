"""Tests of the summary: graphs, nodes, graph breaks, skipped frames and recompiles."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from torch import Tensor, nn
from traced_containers import dynamo_traces_its_own_containers

import ort_dynamo

HERE = str(Path(__file__))
NOTHING = (
    "ort_train: nothing was compiled\n"
    "  A model is compiled at its first call. If it has run already, read the causes: "
    "python -m ort_dynamo help check_where_it_runs"
)


def test_nothing_compiled_is_said() -> None:
    found = ort_dynamo.summary()
    assert (found.compiles, found.graphs, found.islands, found.native) == (0, 0, 0, Counter())
    assert str(found) == NOTHING


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


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum() > 0:  # the branch
            return self.second(y) * 2
        y = y * 3
        torch._dynamo.graph_break()
        y = y * 5
        torch._dynamo.graph_break()
        return y * 7


def helper(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3  # the helper's branch


def calls_a_helper(x: Tensor) -> Tensor:
    return helper(x + 1) + 1


def repeats(x: Tensor) -> Tensor:
    x = x + 1
    while x.sum() < 100:  # the loop
        x = x * 2
    return x


def line_of(comment: str) -> str:
    """The place of a line of this file."""
    (number,) = (n for n, line in enumerate(Path(HERE).read_text().splitlines(), 1) if line.endswith(f"  # {comment}"))
    return f"{HERE}:{number}"


@pytest.mark.parametrize(
    ("function", "comment", "names"),
    [
        (Branching(), "the branch", ["Branching.forward"]),
        (calls_a_helper, "the helper's branch", ["calls_a_helper", "helper"]),
        (repeats, "the loop", ["repeats", "repeats"]),
    ],
)
def test_a_branch_on_the_value_of_a_tensor_is_a_graph_break_with_its_line(
    function: Any, comment: str, names: list[str]
) -> None:
    torch.compile(function, backend="ort_train")(torch.ones(2, 3) if comment == "the loop" else torch.ones(1, 3))
    found = ort_dynamo.summary()
    # From Python 3.12 on, the bytecode of a loop jumps back where Dynamo gives up instead of breaking the graph again.
    gives_up = function is repeats and sys.version_info >= (3, 12)
    assert len(found.skipped) == gives_up
    breaks = [one for one in (*found.breaks, *found.skipped) if "Data-dependent branching" in one.reason]
    assert [one.name.partition(" ")[0] for one in breaks] == names
    assert {one.where for one in breaks} == {line_of(comment)}
    assert f"graph breaks:\n  {names[0]} ({line_of(comment)})" in str(found)


def test_a_break_that_is_compiled_again_after_a_reset_is_listed_once() -> None:
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(calls_a_helper, backend="ort_train")(torch.ones(2))
    assert [one.function for one in ort_dynamo.summary().breaks] == ["calls_a_helper", "helper"]
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend="ort_train")(torch.ones(2))
    assert ort_dynamo.summary().breaks == ()


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
    assert str(ort_dynamo.summary()) == NOTHING


def test_a_reset_forgets() -> None:
    torch.compile(lambda x: x + 1, backend="ort_train")(torch.ones(2))
    torch._dynamo.reset()
    assert str(ort_dynamo.summary()) == NOTHING


@pytest.mark.parametrize(("value", "lines"), [("1", 2), ("0", 0), (None, 0)])
def test_it_is_printed_at_exit_where_it_is_asked_for(value: str | None, lines: int) -> None:
    program = "import torch; torch.compile(lambda x: x + 1, backend='ort_train')(torch.ones(2))"
    environment = {name: text for name, text in os.environ.items() if name != "ORT_DYNAMO_SUMMARY"}
    if value is not None:
        environment["ORT_DYNAMO_SUMMARY"] = value
    done = run_program(program, env=environment, warnings=["ignore"])
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == lines, done.stderr
    assert lines == 0 or done.stderr.startswith("ort_train: compiles 1, graphs 1, islands 1 (0 from the cache)")


def test_a_value_that_is_neither_0_nor_1_is_refused() -> None:
    program = "import torch; torch.compile(lambda x: x + 1, backend='ort_train')(torch.ones(2))"
    done = run_program(program, env={**os.environ, "ORT_DYNAMO_SUMMARY": "yes"}, warnings=["ignore"])
    assert "variable ORT_DYNAMO_SUMMARY cannot be 'yes': expected 0 or 1." in done.stderr


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_functions_beyond_the_recompile_limit_are_listed_by_their_modules() -> None:
    for width in range(2, 13):
        torch.compile(nn.Sequential(nn.Linear(width, 2)), backend="ort_train")(torch.ones(1, width))
        torch.compile(Wide(width), backend="ort_train")(torch.ones(1, width))
    found = ort_dynamo.summary()
    assert found.compiles == 16
    torchs, own = found.limited
    assert (torchs.module, torchs.where.partition(":")[0]) == ("Sequential", HERE)
    assert (own.module, own.where.partition(":")[0]) == ("Wide", HERE)
    for one in found.limited:
        assert one.function == "forward"
        assert "torch._dynamo.config.recompile_limit (8)" in one.reason
        assert "torch.compiler.reset()" in one.reason
    assert "modules of torch.nn" in torchs.reason
    assert "modules of torch.nn" not in own.reason
    assert found.skipped == ()
    text = str(found)
    assert f"recompile limit reached:\n  Sequential.forward ({torchs.where}): " in text
    again = text.partition("compiled again:\n")[2].splitlines()
    assert [line.partition(" (")[0] for line in again] == ["  Sequential.forward", "  Wide.forward"]
    assert all(" 7 times, the last one for " in line for line in again)
    assert "external_utils" not in text
    assert len(text.splitlines()) <= 25


def test_a_notebook_shows_the_page() -> None:
    torch.compile(lambda x: x + 1, backend="ort_train")(torch.ones(2))
    found = ort_dynamo.summary()
    assert repr(found) == str(found)
    assert found._repr_html_() == f"<pre>{str(found).replace('<', '&lt;').replace('>', '&gt;')}</pre>"
    assert found == ort_dynamo.summary()
