"""What an installed copy looks like, and architecture claims as tests."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def run(program: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_installs_one_package_and_its_data(tmp_path: Path) -> None:
    pytest.importorskip("build.__main__")  # "build" alone is also the folder that this leaves behind
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"ort_dynamo"}
    for needed in ("passes/pipelines.py", "passes/onnx/fuse_row_sum.py", "py.typed", "runtime/kernels_1.19.2_cpu.json"):
        assert f"ort_dynamo/{needed}" in names


def test_the_backend_is_registered_without_an_import() -> None:
    assert "ort_train" in torch._dynamo.list_backends()


def test_the_passes_refuse_to_be_imported_by_their_folder_name() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "import this package as ort_dynamo.passes" in result.stderr


def test_compiling_needs_no_import_and_no_writable_folder(tmp_path: Path) -> None:
    folder = tmp_path / "readonly"
    folder.mkdir()
    folder.chmod(0o555)
    program = (
        "import torch; m = torch.nn.Linear(4, 2); f = torch.compile(m, backend='ort_train')\n"
        "f(torch.ones(3, 4)).sum().backward(); print(m.weight.grad.sum().item())"
    )
    try:
        assert float(run(program, folder)) == 24.0
        assert not list(folder.iterdir())
    finally:
        folder.chmod(0o755)


def test_the_compiler_fits_on_a_page() -> None:
    assert len((ROOT / "ort_dynamo" / "compiler.py").read_text().splitlines()) <= 90


def test_no_pass_imports_another_and_none_knows_the_runtime() -> None:
    for file in (ROOT / "passes").rglob("*.py"):
        if file.name in ("pipelines.py", "__init__.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is None or module.startswith("ort_dynamo.passes.analysis"):
                continue
            assert not module.startswith(("ort_dynamo.passes", "onnxruntime", "ort_dynamo.runtime"))


def test_files_stay_small() -> None:
    sources = [f for top in ("ort_dynamo", "passes") for f in (ROOT / top).rglob("*.py")]
    long = {f.name: n for f in sources if (n := len(f.read_text().splitlines())) > 400}
    assert not long, f"past 400 lines a file wants to be two: {long}"
