"""The memory of a whole process, beside what the plan says: ONNX Runtime's arena, its order and its reuse included."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from ort_dynamo.release import release
from ort_dynamo.runtime.capabilities import installed_runtime

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")

_CHILD = """
import json, sys
import torch
from bench.workloads import build
from ort_dynamo import memory_plan

torch.set_num_threads(1)
name, size, options = json.loads(sys.argv[1])
options = {**options, "placement": "onnxruntime"}  # what a session holds is what the plan is of
workload = build(name, size)
(plan,) = memory_plan(workload.module, *workload.batch, options=options).graphs
for parameter in workload.module.parameters():
    parameter.grad = torch.zeros_like(parameter)
step = torch.compile(workload.module, backend="ort_train", options=options)


def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024


for _ in range(3):
    step(*workload.batch).backward()
print(json.dumps([plan.record.peak, plan.record.nbytes, plan.record.nbytes_without, peak()]))
"""


@cache
def measured(name: str, size: str, options: str) -> list[int]:
    """Predicted peak, bytes kept, bytes kept without recomputation, and the process's own peak."""
    given = json.dumps([name, size, json.loads(options)])
    done = subprocess.run([sys.executable, "-c", _CHILD, given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [int(number) for number in json.loads(done.stdout.splitlines()[-1])]


LAYERS: dict[str, Any] = {"transformer_layer_recompute": True}
HALF: dict[str, Any] = {"memory_budget": 0.5}

CASES = [
    ("gpt2", LAYERS),
    pytest.param("gpt2", HALF, marks=pytest.mark.slow),
    pytest.param("bert", LAYERS, marks=pytest.mark.slow),
    pytest.param("bert", HALF, marks=pytest.mark.slow),
    pytest.param(
        "resnet",
        LAYERS,
        marks=pytest.mark.xfail(
            release(installed_runtime().version) >= (1, 32),
            reason="seen with onnxruntime 1.32.0 and torch 2.15.0: the peak falls by 18.5 MB where 23.9 are predicted; "
            "why is not known. With 1.31.1 and 1.19.2 it falls by what is predicted.",
            strict=False,
        ),
    ),
    pytest.param("resnet", HALF, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_peak_falls_by_what_the_plan_says(name: str, options: dict[str, Any]) -> None:
    plain, _, _, before = measured(name, "deep", json.dumps({}))
    planned, kept, all_, after = measured(name, "deep", json.dumps(options))
    if options is HALF:
        assert kept <= 0.5 * all_
    elif name != "resnet":  # the borders of a convolutional net's stages are a larger share
        assert kept <= 0.2 * all_
    assert before - after == pytest.approx(plain - planned, rel=0.15)
