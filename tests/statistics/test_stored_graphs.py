"""A graph that a process reads from the cache has the statistics of the one that compiled it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from forked import run_program

from ort_dynamo.torch_internals.aot_cache import AOT_CACHE

PROGRAM = """
import json
import torch
import ort_dynamo
from torch._dynamo.utils import counters


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x).tanh())


torch.manual_seed(0)
model = torch.nn.Sequential(Layer(), Layer(), torch.nn.Conv1d(4, 2, 3))
compiled = torch.compile(model, backend="ort_train")
x = torch.randn(4, 8)
with ort_dynamo.collect_statistics() as run:
    compiled(x).sum().backward()
run.save("run.json")
print(json.dumps([counters["aot_autograd"], counters["ort_train"], ort_dynamo.summary().cache_hits]))
"""


def ran(folder: Path, trace_cache: str, **variables: str) -> tuple[list[Any], list[dict[str, Any]]]:
    environment = {
        **os.environ,
        "ORT_DYNAMO_CACHE": "1",
        "ORT_DYNAMO_CACHE_DIR": str(folder / "cache"),
        "ORT_DYNAMO_TRACE_CACHE": trace_cache,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
        **variables,
    }
    done = run_program(PROGRAM, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), json.loads((folder / "run.json").read_text())


def test_islands_of_the_cache_on_disk_have_the_same_statistics(tmp_path: Path) -> None:
    (_, first), ((_, _, hits), second) = ran(tmp_path, "0"), ran(tmp_path, "0", PYTHONHASHSEED="2")
    assert hits > 0
    assert len(first) > 20
    assert second == first


@pytest.mark.skipif(not AOT_CACHE, reason="this torch keeps nothing of a backend of others")
def test_graphs_of_the_cache_of_torch_have_the_same_statistics(tmp_path: Path) -> None:
    (_, first), ((torch_counts, _, _), second) = ran(tmp_path, "1"), ran(tmp_path, "1", PYTHONHASHSEED="2")
    assert torch_counts["autograd_cache_hit"] == 1
    assert len(first) > 20
    assert second == first
