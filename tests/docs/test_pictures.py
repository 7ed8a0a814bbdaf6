"""The pictures and the stages of docs/internals/pipeline.md are up to date with their scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import nn

from ort_dynamo.compilation.choose_target import session_device
from ort_dynamo.compilation.compiler import Compilation
from ort_dynamo.compilation.events import GraphCompilation, Listener
from ort_dynamo.options.groups import parse_options
from ort_dynamo.passes.fx.analysis.views import is_view
from ort_dynamo.torch_internals.kernels.operators import OpOverload

ONE_VERSION = pytest.mark.skipif(
    not torch.__version__.startswith("2.13") or not onnxruntime.__version__.startswith("1.31"),
    reason="the pages show the graphs of one version",
)
DOCS = Path(__file__).resolve().parents[2] / "docs"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a script of the folder docs."""
    environment = {**os.environ, "PYTHONPATH": str(DOCS.parent)}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=DOCS.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_pictures_without_data_are_those_that_the_script_draws(tmp_path: Path) -> None:
    done = run("docs/pictures.py", tmp_path, "pipeline", "islands")
    assert done.returncode == 0, done.stderr
    for name in ("pipeline.svg", "islands.svg"):
        assert (tmp_path / name).read_text() == (DOCS / "_static" / name).read_text(), "run python docs/pictures.py"


@ONE_VERSION
def test_the_picture_of_islands_shows_the_islands_of_its_model() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(DOCS)!r}); import pictures; print(pictures.ISLANDS, pictures.IN_TORCH)"
    )
    drawn = run("-c", program).stdout.strip()
    found: list[GraphCompilation] = []

    class Seen(Listener):
        def segmented(self, graph: GraphCompilation) -> None:
            found.append(graph)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = nn.functional.gelu(self.a(x))
            h = torch.fft.fft(h).real
            return nn.functional.dropout(self.b(h), 0.1)

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        return Compilation(parse_options(None, None), session_device(gm, inputs), 1, Seen()).run(gm, inputs)

    torch.compile(Net(), backend=backend)(torch.randn(4, 8, 16))
    segmented = found[0].segmented
    islands = {name: operators(island) for name, island in segmented.islands.items()}
    assert drawn == f"{islands} {operators(segmented.gm)}"


def operators(gm: torch.fx.GraphModule) -> list[str]:
    """Names of a graph's operators, but for views of the same dtype and for items of tuples."""
    calls = [node for node in gm.graph.nodes if isinstance(node.target, OpOverload)]
    shown = (one for one in calls if not is_view(one) or "as_real" in str(one.target))
    return [str(node.target).split(".")[1] for node in shown if "_unsafe_view" not in str(node.target)]


@ONE_VERSION
def test_the_stages_of_the_page_are_those_of_its_model() -> None:
    done = run("docs/stages.py", "--check")
    assert done.returncode == 0, done.stderr
