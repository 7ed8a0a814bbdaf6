"""Tests of the memory of sessions and of a whole process, against the plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from forked import run_program

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")

_CHILD = """
import ctypes, gc, json, sys
import torch
from bench.workloads import build
from ort_dynamo import memory_plan

torch.set_num_threads(1)
name, size, options = json.loads(sys.argv[1])
options = {**options, "placement": "onnxruntime"}  # the plan predicts the memory of sessions
workload = build(name, size)
(plan,) = memory_plan(workload.module, *workload.batch, options=options).graphs
for parameter in workload.module.parameters():
    parameter.grad = torch.zeros_like(parameter)
step = torch.compile(workload.module, backend="ort_train", options=options)


def kib(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])


step(*workload.batch).backward()  # compiles, and takes memory that a step does not
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
step(*workload.batch).backward()
peak = (kib("VmHWM") - kib("RssFile")) * 1024  # how much of torch's libraries is in memory differs from run to run
print(json.dumps([plan.record.peak, plan.record.nbytes, plan.record.nbytes_without, peak]))
"""


@cache
def measured(name: str, size: str, options: str) -> list[int]:
    """Predicted peak, bytes kept, these without recomputation, and the peak of a step in the process's own memory."""
    given = json.dumps([name, size, json.loads(options)])
    done = subprocess.run([sys.executable, "-c", _CHILD, given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [int(number) for number in json.loads(done.stdout.splitlines()[-1])]


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}

LAYERS: dict[str, Any] = {"recompute_plan": "layers"}
HALF: dict[str, Any] = {"memory_budget": 0.5}

CASES = [
    ("gpt2", LAYERS),
    pytest.param("gpt2", HALF, marks=pytest.mark.slow),
    pytest.param("bert", LAYERS, marks=pytest.mark.slow),
    pytest.param("bert", HALF, marks=pytest.mark.slow),
]
"""A ResNet's fall of 20 MB depends as much on fragmentation, so its test below counts live bytes."""


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_peak_falls_as_the_plan_predicts(name: str, options: dict[str, Any]) -> None:
    plain, _, _, before = measured(name, "deep", json.dumps({}))
    planned, kept, all_, after = measured(name, "deep", json.dumps(options))
    if options is HALF:
        assert kept <= 0.5 * all_
    else:
        assert kept <= 0.2 * all_
    assert before - after == pytest.approx(plain - planned, rel=0.15)


_ALIVE = """
import gc, glob, json, re, sys
import torch
from bench.workloads import build
from ort_dynamo.report.record import RECORDS

name, size, options = json.loads(sys.argv[1])
workload = build(name, size)
profiled = {"placement": "onnxruntime", "session_options": {"enable_profiling": True}}
step = torch.compile(workload.module, backend="ort_train", options={**options, **profiled})
for _ in range(2):
    workload.module.zero_grad()
    step(*workload.batch).backward()
(record,) = RECORDS
predicted = record.partition.memory.peak
del step
torch._dynamo.reset()
gc.collect()  # sessions write their profiles when they are freed
profiles = "".join(open(file).read() for file in glob.glob("onnxruntime_profile*.json"))
found = re.findall(r'"mem_in_use_peak" *: *"(\\d+)"', profiles)
print(json.dumps([predicted, max(map(int, found), default=0)]))
"""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit", {}),
        ("gpt2", {}),
        ("resnet", {}),
        ("resnet", LAYERS),
        ("resnet", HALF),
        pytest.param("bert", {}, marks=pytest.mark.slow),
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("gpt2", LAYERS, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_live_bytes_in_sessions_are_as_the_plan_predicts(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """A backward that one session runs: sections of it are the next test's."""
    check_alive(tmp_path, name, "small", {**options, "backward_sections": 1})


@pytest.mark.parametrize("name", ["llama", pytest.param("vit", marks=pytest.mark.slow)])
def test_live_bytes_in_sections_are_as_the_plan_predicts(tmp_path: Path, name: str) -> None:
    """The backward of a medium model is cut into sections, whose ends free saved tensors."""
    cut = check_alive(tmp_path, name, "medium", {})
    whole = check_alive(tmp_path, name, "medium", {"backward_sections": 1})
    assert cut < 0.95 * whole


def check_alive(folder: Path, name: str, size: str, options: dict[str, Any]) -> int:
    """Compare the live bytes with the plan, and give them, by ONNX Runtime's count of the bytes in use in its arena.

    Holes are not counted. The plan has no temporary tensors of an operator's ONNX form: a convolution's gradient has
    its image three times.
    """
    folder = Path(mkdtemp(dir=folder))
    done = run_program(_ALIVE, json.dumps([name, size, options]), cwd=folder, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    predicted, alive = json.loads(done.stdout.splitlines()[-1])
    if not alive:
        pytest.skip("this ONNX Runtime's profiles say nothing of memory")
    assert alive == pytest.approx(predicted, rel=0.1)
    return int(alive)
