"""Torch's log of compiles has the models and the passes of each compile if TORCH_TRACE names a folder."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest
import torch
from forked import run_program

from ort_dynamo.listeners import write_trace
from ort_dynamo.torch_internals import lookup
from ort_dynamo.torch_internals.tracing import structured_trace

PROGRAM = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
step = torch.compile(net, backend="ort_train")
step(torch.randn(3, 4)).sum().backward()
with torch.no_grad():
    step(torch.randn(3, 4))
print("trained")
"""


def artifacts(folder: Path) -> dict[str, tuple[dict[str, object], str]]:
    """The artifacts in the log that have this project's prefix: name -> (the log's entry, the text)."""
    (log,) = folder.glob("dedicated_log_torch_trace_*.log")
    found: dict[str, tuple[dict[str, object], str]] = {}
    for entry in re.split(r"^V\d{4} .*?\] (?=\{)", log.read_text(), flags=re.MULTILINE)[1:]:
        head, _, payload = entry.partition("\n")
        record = json.loads(head)
        name = record.get("artifact", {}).get("name", "")
        if name.startswith("ort_dynamo_"):
            assert name not in found
            found[name] = record, re.sub("^\t", "", payload, flags=re.MULTILINE)
    return found


def ran(**variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    done = run_program(PROGRAM, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def test_models_and_passes_are_in_torchs_log(tmp_path: Path) -> None:
    assert ran(TORCH_TRACE=str(tmp_path)).stdout == "trained\n"
    found = artifacts(tmp_path)
    assert sorted(found) == [
        "ort_dynamo_backward_island_0",
        "ort_dynamo_backward_passes",
        "ort_dynamo_forward_island_0",
        "ort_dynamo_forward_passes",
        "ort_dynamo_inference_island_0",
        "ort_dynamo_inference_passes",
        "ort_dynamo_joint_passes",
    ]
    attempts = {name: (record["frame_id"], record["frame_compile_id"]) for name, (record, _) in found.items()}
    assert attempts["ort_dynamo_backward_passes"] == attempts["ort_dynamo_forward_island_0"] == (0, 0)
    assert attempts["ort_dynamo_inference_island_0"] == (0, 1)
    assert all(record["artifact"]["encoding"] == "string" for record, _ in found.values())  # type: ignore[index]

    model = found["ort_dynamo_forward_island_0"][1]
    assert '%"primals_1"<FLOAT,[8,4]>' in model
    assert '%"output_1"<FLOAT,[3,2]> = ' in model
    assert model.isascii()
    passes = found["ort_dynamo_forward_passes"][1]
    assert passes.startswith("forward graph: 5 nodes in ONNX Runtime in 1 islands, ")
    assert re.search(r"^island_0: 0 to 2 \(forward\), forward-\w+, \d+ ONNX nodes, from a new build$", passes, re.M)
    assert re.search(r"^ +\d+\.\d\d ms  (un)?changed +SeparateOutputs\(\)$", passes, re.M)
    joint = found["ort_dynamo_joint_passes"][1]
    assert "saved for the backward" in joint
    assert "RemoveNoOps" in joint


def test_an_island_from_the_cache_is_written_as_well(tmp_path: Path) -> None:
    cache = {"ORT_DYNAMO_CACHE": "1", "ORT_DYNAMO_CACHE_DIR": str(tmp_path / "cache"), "ORT_DYNAMO_TRACE_CACHE": "0"}
    for name in ("first", "second"):
        ran(TORCH_TRACE=str(tmp_path / name), **cache)
    first, second = artifacts(tmp_path / "first"), artifacts(tmp_path / "second")
    assert "from the cache on disk" in second["ort_dynamo_forward_passes"][1]
    for name in ("ort_dynamo_forward_island_0", "ort_dynamo_backward_island_0"):
        assert first[name][1] == second[name][1]


def test_fallbacks_are_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: dict[str, str] = {}
    monkeypatch.setattr(write_trace, "write_artifact", lambda name, text: texts.update({name: text()}))
    step = torch.compile(lambda x: torch.linalg.matrix_exp(x.tanh()).exp(), backend="ort_train")
    step(torch.randn(3, 3))
    report = texts["ort_dynamo_inference_passes"]
    assert "1 in eager (fallback)\n  aten.linalg_matrix_exp.default: " in report
    assert {"ort_dynamo_inference_island_0", "ort_dynamo_inference_island_1"} <= set(texts)


def test_no_text_is_made_without_a_log() -> None:
    patched = f"""
from ort_dynamo.listeners import write_trace
def made(*_):
    raise AssertionError("a text was made")
write_trace._text = write_trace._lines = made
{PROGRAM}"""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TORCH_TRACE", "TORCH_COMPILE_DEBUG")
    }
    done = run_program(patched, env=environment)
    assert done.stdout == "trained\n", done.stderr


def test_without_torchs_function_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> object:
        raise AttributeError(path)

    monkeypatch.setattr(lookup, "_find", missing)
    monkeypatch.setattr(lookup, "_missing", set())
    stand_in = runpy.run_path(str(structured_trace.__file__))["write_artifact"]
    stand_in("a name", lambda: pytest.fail("a text was made"))
