"""An ONNX Runtime that is missing or damaged is an error that names it, and the program goes on in eager mode."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from children import ROOT

PROGRAM = """
import torch

model = torch.nn.Linear(2, 2)
try:
    from ort_dynamo.errors import RuntimeNotInstalledError

    torch.compile(model, backend="ort_train")(torch.ones(1, 2))
except Exception as error:
    causes = []
    while error is not None:
        causes.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    print("raised", *causes, sep="\\n")
else:
    print("ran")
torch._dynamo.reset()
model(torch.ones(1, 2)).sum().backward()
print("eager", tuple(model.weight.grad.shape))
"""


def packages(place: Path, *, without: str) -> Path:
    """Link all installed packages but those whose names begin with `without` into a folder."""
    place.mkdir()
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if not one.name.startswith(without):
            (place / one.name).symlink_to(one)
    return place


def run_alone(folder: Path) -> str:
    """Run the program with the packages of a folder alone."""
    path = os.pathsep.join([str(ROOT), str(folder)])
    command = [sys.executable, "-S", "-c", PROGRAM]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_runtime_at_all(tmp_path: Path) -> None:
    out = run_alone(packages(tmp_path / "packages", without="onnxruntime"))
    assert "RuntimeNotInstalledError: ort_train needs ONNX Runtime" in out
    assert out.endswith("eager (2, 2)\n")


def test_a_damaged_library(tmp_path: Path) -> None:
    folder = packages(tmp_path / "packages", without="onnxruntime")
    for one in Path(sysconfig.get_path("purelib")).glob("onnxruntime*"):
        if one.name != "onnxruntime":
            (folder / one.name).symlink_to(one)  # what pip knows
    source, copy = Path(sysconfig.get_path("purelib")) / "onnxruntime", folder / "onnxruntime"
    (copy / "capi").mkdir(parents=True)
    for one in [*source.iterdir(), *(source / "capi").iterdir()]:
        target = copy / one.relative_to(source)
        if one.name.startswith("onnxruntime_pybind11_state"):
            target.write_text("<html>403 Forbidden</html>")  # a proxy's answer in the place of the file
        elif one.name != "capi":
            target.symlink_to(one)
    out = run_alone(folder)
    assert "onnxruntime_pybind11_state" in out
    assert out.startswith("raised\n")
    assert out.endswith("eager (2, 2)\n")
