"""torch's own tools for compiled programs work with this backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

import ort_dynamo
from ort_dynamo.backend import ort_train
from ort_dynamo.report.record import RECORDS

PROGRAM = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
step = torch.compile(net, backend="ort_train")
step(torch.randn(3, 4)).sum().backward()
print("trained", net[0].weight.grad.shape)
"""

SABOTAGE = """
import torch
from ort_dynamo.compilation.compiler import Compilation
compile_graph = Compilation.graph
def sabotaged(self, gm, *args, **kwargs):
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.tanh.default:
            {action}
    return compile_graph(self, gm, *args, **kwargs)
Compilation.graph = sabotaged
"""
"""A `sitecustomize` module, by which each process of a test has a backend that cannot compile `tanh`."""


def ran(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def broken(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


# -- logs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logs", ["ort_dynamo", "+ort_dynamo"])
def test_torch_logs_shows_each_graph(logs: str, tmp_path: Path) -> None:
    done = run_program(PROGRAM, cwd=tmp_path, env={**os.environ, "TORCH_LOGS": logs})
    assert done.stdout.startswith("trained"), done.stderr
    for role in ("forward", "backward"):
        assert f"{role} graph, 1 island(s): " in done.stderr
    assert "[0/0]" in done.stderr


@pytest.mark.parametrize(
    ("stage", "shown"),
    [("compilation", "saved for the backward"), ("passes", "passes changed the"), ("cache", "island ")],
)
def test_torch_logs_shows_one_stage(stage: str, shown: str, tmp_path: Path) -> None:
    done = run_program(PROGRAM, cwd=tmp_path, env={**os.environ, "TORCH_LOGS": f"+ort_dynamo.{stage}"})
    assert done.stdout.startswith("trained"), done.stderr
    assert shown in done.stderr
    assert "1 island(s): " not in done.stderr


# -- explain -----------------------------------------------------------------------------------------------------------


def test_explain_counts_the_graphs_that_this_backend_compiles() -> None:
    explained = torch._dynamo.explain(broken)(torch.randn(3))
    assert (explained.graph_count, explained.graph_break_count) == (2, 1)
    torch._dynamo.reset()
    torch.compile(broken, backend="ort_train")(torch.randn(3))
    assert ort_dynamo.summary().compiles == 2


def test_explain_takes_a_module_that_is_compiled_elsewhere() -> None:
    model = net()
    torch.compile(model, backend="ort_train")(torch.randn(3, 4)).sum().backward()
    explained = torch._dynamo.explain(model)(torch.randn(3, 4))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


# -- the minifier ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("after", "level"), [("dynamo", "2"), ("dynamo", "4"), ("aot", "2")])
def test_a_right_model_trains_while_the_minifier_watches(after: str, level: str, tmp_path: Path) -> None:
    done = ran("-c", PROGRAM, folder=tmp_path, TORCHDYNAMO_REPRO_AFTER=after, TORCHDYNAMO_REPRO_LEVEL=level)
    assert done.stdout.startswith("trained"), done.stderr
    assert not list(tmp_path.rglob("minifier_launcher.py"))
    assert "Error" not in done.stderr  # level 4 logs an error of the compiled graph, and takes it for a match


@pytest.mark.parametrize(
    ("level", "action", "said"),
    [
        ("2", "raise RuntimeError('no tanh today')", "no tanh today"),
        ("4", "node.target = torch.ops.aten.sin.default", "AccuracyError"),
    ],
)
def test_the_minifier_finds_the_operator(level: str, action: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE.format(action=action))
    path = os.pathsep.join([str(tmp_path), str(Path(ort_dynamo.__file__).parents[1])])
    first = ran(
        *("-c", PROGRAM),
        folder=tmp_path,
        PYTHONPATH=path,
        TORCHDYNAMO_REPRO_AFTER="dynamo",
        TORCHDYNAMO_REPRO_LEVEL=level,
    )
    assert first.returncode != 0
    assert said in first.stderr
    (launcher,) = tmp_path.rglob("minifier_launcher.py")
    found = ran(str(launcher), folder=tmp_path, PYTHONPATH=path)
    assert found.returncode == 0, found.stderr
    repro = (tmp_path / "repro.py").read_text()
    assert "torch.tanh(" in repro
    assert "torch.nn.functional.linear" not in repro
    assert "torch._C._nn.linear" not in repro
    again = ran("repro.py", folder=tmp_path, PYTHONPATH=path)
    assert again.returncode != 0
    assert said in again.stderr


# -- stances -----------------------------------------------------------------------------------------------------------


def test_force_eager_compiles_nothing() -> None:
    model = net()
    step, x = torch.compile(model, backend="ort_train"), torch.randn(3, 4)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(step(x), model(x))
        assert len(RECORDS) == 0
    step(x)
    assert len(RECORDS) == 1


def test_eager_on_recompile_runs_other_inputs_in_eager() -> None:
    model = net()
    step = torch.compile(model, backend="ort_train")
    step(torch.randn(3, 4)).sum().backward()
    x = torch.randn(5, 4)
    with torch.compiler.set_stance("eager_on_recompile"):
        assert torch.equal(step(x), model(x))
        step(torch.randn(3, 4)).sum().backward()
    assert len(RECORDS) == 1
    step(x)
    assert len(RECORDS) == 2


def test_fail_on_recompile_raises() -> None:
    step = torch.compile(net(), backend="ort_train")
    step(torch.randn(3, 4))
    with torch.compiler.set_stance("fail_on_recompile"):
        step(torch.randn(3, 4))
        with pytest.raises(RuntimeError, match="fail_on_recompile"):
            step(torch.randn(5, 4))


def test_a_stance_can_name_this_backend() -> None:
    step = torch.compile(net(), backend="eager")
    with torch.compiler.set_stance("default", force_backend="ort_train"):
        step(torch.randn(3, 4)).sum().backward()
    assert [graph.role for record in RECORDS for graph in record.graphs] == ["forward", "backward"]
    ort_train.reset()  # type: ignore[attr-defined]  # Dynamo's reset() knows only backends of torch.compile calls


# -- compiled modules --------------------------------------------------------------------------------------------------


def test_fullgraph_compiles_whole_functions_and_refuses_others() -> None:
    x = torch.randn(3, 4)
    torch.compile(net(), backend="ort_train", fullgraph=True)(x).sum().backward()
    assert len(RECORDS) == 1
    with pytest.raises(Unsupported, match="graph_break"):
        torch.compile(broken, backend="ort_train", fullgraph=True)(x)


def test_mark_dynamic_makes_one_graph_for_all_sizes() -> None:
    model = net()
    step = torch.compile(model, backend="ort_train")
    for size in (3, 4, 7):
        x = torch.randn(size, 4)
        torch._dynamo.mark_dynamic(x, 0)
        out = step(x)
        torch.testing.assert_close(out, model(x))
        out.sum().backward()
    assert len(RECORDS) == 1


def test_disable_keeps_a_function_out() -> None:
    seen: list[Any] = []

    @torch.compiler.disable
    def apart(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x.tanh()

    x = torch.randn(3)
    out = torch.compile(lambda x: apart(x * 2) + 1, backend="ort_train")(x)
    torch.testing.assert_close(out, (x * 2).tanh() + 1)
    assert (seen, len(RECORDS)) == ([False], 2)
    assert not any("tanh" in target for record in RECORDS for graph in record.graphs for target in graph.native)
