"""Tests of failures around the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import onnx

PROGRAM = """
import sys, torch
folder = sys.argv[1]
print("ready", flush=True)
for width in range(2, 200):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
    torch.compile(model, backend="ort_train", options={"save_onnx": folder})(torch.ones(3, width)).sum().backward()
"""


def test_a_killed_process_leaves_only_whole_files(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("*.onnx"))) < 4 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    saved = list(tmp_path.glob("*.onnx"))
    assert len(saved) >= 4
    for file in saved:
        onnx.checker.check_model(onnx.load(file))
