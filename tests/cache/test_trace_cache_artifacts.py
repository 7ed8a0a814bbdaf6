"""Tests of torch's artifacts and of Dynamo's precompile, which hold the islands of their graphs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from forked import run_program

from ort_dynamo.torch_internals.aot_cache import AOT_CACHE

pytestmark = pytest.mark.skipif(not AOT_CACHE, reason="this torch keeps nothing of a backend of others")

FILE = """
import json, sys
from pathlib import Path
import torch
import ort_dynamo
from ort_dynamo.cache.disk import COUNTS
from torch._dynamo.utils import counters

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()

artifacts = Path(sys.argv[1])
if artifacts.exists():
    torch.compiler.load_cache_artifacts(artifacts.read_bytes())
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(model, backend="ort_train")
losses = []
for _ in range(3):
    loss = step(torch.ones(3, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
if (saved := torch.compiler.save_cache_artifacts()) is not None:
    artifacts.write_bytes(saved[0])
print(json.dumps({"losses": losses, "frames": counters["frames"]["total"], "aot": counters["aot_autograd"],
                  "counts": COUNTS, "islands": str(ort_dynamo.summary()).splitlines()[0]}))
"""


def ran_as_a_file(program: Path, artifacts: Path, place: Path, **variables: str) -> dict[str, Any]:
    program.write_text(FILE)
    environment = {
        **os.environ,
        "ORT_DYNAMO_CACHE": "1",
        "ORT_DYNAMO_CACHE_DIR": str(place / "cache"),
        "ORT_DYNAMO_TRACE_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(place / "torch"),
        **variables,
    }
    done = run_program(program, str(artifacts), env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_artifacts_of_torch_hold_the_islands(tmp_path: Path) -> None:
    program, artifacts = tmp_path / "program.py", tmp_path / "artifacts"
    first = ran_as_a_file(program, artifacts, tmp_path / "here")
    assert first["aot"]["autograd_cache_saved"] == 1
    elsewhere = ran_as_a_file(program, artifacts, tmp_path / "there", PYTHONHASHSEED="2")
    assert elsewhere["aot"]["autograd_cache_hit"] == 1
    assert elsewhere["counts"] == {"hit": 2}
    assert elsewhere["losses"] == first["losses"]


def test_dynamos_precompile_finds_the_islands_or_compiles_anew(tmp_path: Path) -> None:
    program, on = tmp_path / "program.py", {"TORCH_CACHING_PRECOMPILE": "1"}
    first = ran_as_a_file(program, tmp_path / "a", tmp_path, **on)
    second = ran_as_a_file(program, tmp_path / "b", tmp_path, **on)
    assert first["frames"] == 1
    assert second["frames"] == 0  # Dynamo looked at nothing
    assert second["counts"] == {"hit": 2}
    assert "islands 2 (2 from the cache)" in second["islands"]
    assert second["losses"] == first["losses"]
    for file in (tmp_path / "cache").iterdir():
        file.unlink()
    without = ran_as_a_file(program, tmp_path / "c", tmp_path, **on)
    assert without["frames"] == 1  # Dynamo compiles everything again
    assert without["losses"] == first["losses"]
