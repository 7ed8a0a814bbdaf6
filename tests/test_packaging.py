"""Tests of the installed package and of the architecture."""

from __future__ import annotations

import ast
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable
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


def build(source: Path, target: Path, **environment: str) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from it; give the paths of wheel and source distribution."""
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(source)],
        check=True,
        capture_output=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000", **environment},
    )
    (wheel,), (archive,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, archive


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("build.__main__")  # "build" alone is also the folder that this leaves behind
    with open(tmp_path_factory.getbasetemp().parent / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # setuptools writes beside the sources, and each worker builds
        return build(ROOT, tmp_path_factory.mktemp("built"))


def test_the_wheel_has_one_package_and_the_source_distribution_all(built: tuple[Path, Path]) -> None:
    wheel, archive = built
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"ort_dynamo"}
    files = ("py.typed", "runtime/kernels_1.19.2_cpu.json", "runtime/kernels/fused.c", "runtime/kernels/fused.h")
    for needed in ("passes/pipelines.py", "passes/onnx/fuse_row_sum.py", "docs/how_to/troubleshooting.md", *files):
        assert f"ort_dynamo/{needed}" in names
    with tarfile.open(archive) as content:
        everything = {name.partition("/")[2] for name in content.getnames()}
    ours = [file for folder in ("tests", "docs", "bench", "passes") for file in (ROOT / folder).rglob("*.*")]
    sources = {str(file.relative_to(ROOT)) for file in ours if file.suffix in (".py", ".md", ".png", ".json", ".jsonl")}
    assert {*sources, "CHANGELOG.md", "LICENSE", ".ci/run", "constraints.txt"} <= everything
    assert not [name for name in everything if ".ci/venv" in name or "__pycache__" in name]


def test_the_bytes_of_both_depend_on_the_sources_alone(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, archive = built
    elsewhere = tmp_path / "another folder"
    with tarfile.open(archive) as content:
        content.extractall(elsewhere, filter="data")
    (sources,) = elsewhere.iterdir()
    (sources / "PKG-INFO").unlink()
    (sources / "setup.cfg").unlink()
    shutil.rmtree(sources / "ort_dynamo.egg-info")
    for path in sources.rglob("*"):
        os.utime(path, (1_500_000_000, 1_500_000_000))
        path.chmod(path.stat().st_mode & 0o700)
    before = os.umask(0o077)
    try:
        again = build(sources, tmp_path / "again", TZ="Asia/Tokyo", PYTHONHASHSEED="7", LC_ALL="C")
    finally:
        os.umask(before)
    for first, second in zip((wheel, archive), again, strict=True):
        assert first.name == second.name
        assert first.read_bytes() == second.read_bytes(), f"two builds of {first.name} differ"


def test_the_backend_is_registered_without_an_import() -> None:
    assert "ort_train" in torch._dynamo.list_backends()


def test_the_passes_refuse_to_be_imported_by_their_folder_name() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "import this package as ort_dynamo.passes" in result.stderr


def test_a_misspelt_name_of_the_package_has_the_nearest_in_its_traceback() -> None:
    program = "import ort_dynamo; ort_dynamo.summry"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("module 'ort_dynamo' has no attribute 'summry'. Did you mean: 'summary'?\n")


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


_BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)


def _statements(block: Iterable[ast.AST], depth: int = 0) -> list[int]:
    """Give the depth of each statement of a block in loops, conditions and functions; skip docstrings."""
    depths: list[int] = []
    for statement in block:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        inner = (child for child in ast.iter_child_nodes(statement) if isinstance(child, _BLOCKS))
        depths += [depth, *_statements(inner, depth + 1)]
    return depths


def test_the_compile_reads_as_a_list_of_stages() -> None:
    """The stages are short calls one after another; a loop inside a condition belongs into the stage."""
    tree = ast.parse((ROOT / "ort_dynamo" / "compilation" / "compiler.py").read_text())
    (page,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Compilation")
    functions = {node.name: node for node in page.body if isinstance(node, ast.FunctionDef)}
    assert {"partition", "forward", "backward", "inference", "graph", "island"} <= functions.keys()
    for name, function in functions.items():
        depths = _statements(function.body)
        assert len(depths) <= 24, f"{name} has {len(depths)} statements"
        assert max(depths) <= 1, f"{name} nests blocks"


def _module(file: Path) -> str:
    return ".".join(("ort_dynamo", *file.relative_to(ROOT).with_suffix("").parts))


def _imports(file: Path) -> set[str]:
    """List the modules that a file imports, and the names from them, which may be modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{file.name}: a relative import"
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return found


def _makes_a_pass(file: Path) -> bool:
    """Check whether the file is in a folder of passes, or defines a pass elsewhere."""
    bases = {
        base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    stands = file.parent in (ROOT / "passes" / "fx", ROOT / "passes" / "onnx")
    return stands or bool(bases & {"PassBase", "InPlacePass"})


def test_no_pass_imports_another_and_none_knows_the_runtime() -> None:
    files = [file for file in (ROOT / "passes").rglob("*.py") if file.name != "__init__.py"]
    passes = {_module(file) for file in files if _makes_a_pass(file)}
    assert "ort_dynamo.passes.fx.hoist_random" in passes
    assert "ort_dynamo.passes.onnx.cast_propagation.propagate_casts" in passes
    for file in files:
        imported = _imports(file)
        if file != ROOT / "passes" / "pipelines.py":
            assert not imported & passes, f"{file.name} imports passes"
        runtime = {name for name in imported if f"{name}.".startswith(("onnxruntime.", "ort_dynamo.runtime."))}
        assert not runtime, f"{file.name} imports {runtime}"


def test_a_folder_of_one_pass_is_imported_by_that_pass_alone() -> None:
    folder = "ort_dynamo.passes.onnx.cast_propagation."
    for file in (ROOT / "passes").rglob("*.py"):
        if not _module(file).startswith(folder) and file.name not in ("pipelines.py", "__init__.py"):
            parts = {name for name in _imports(file) if name.startswith(folder)}
            assert not parts, f"{file.name} imports {parts}"


def test_the_docs_name_files_that_exist() -> None:
    named = re.compile(r"`((?:[\w-]+/)+(?:[\w-]+\.py)?)`")
    missing = {
        f"{page.name}: {path}"
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for path in named.findall(page.read_text())
        if not any((top / path).exists() for top in (ROOT, ROOT / "ort_dynamo"))
    }
    assert not missing


def _sources(*tops: str) -> list[Path]:
    return [file for top in tops for file in (ROOT / top).rglob("*.py")]


def test_files_stay_small() -> None:
    sources = _sources("ort_dynamo", "passes", "tests", "bench")
    long = {str(f.relative_to(ROOT)): n for f in sources if (n := len(f.read_text().splitlines())) > 400}
    assert not long, f"past 400 lines a file wants to be two: {long}"


def test_folders_stay_small() -> None:
    counts = Counter(str(file.parent.relative_to(ROOT)) for file in _sources("ort_dynamo", "passes", "tests"))
    full = {folder: n for folder, n in counts.items() if n > 20}
    assert not full, f"past 20 files a folder wants to be two: {full}"


def test_few_folders_import_each_other() -> None:
    """Modules beside the folders, such as the errors, do not count."""
    folders = {init.parent.name for init in (ROOT / "ort_dynamo").glob("*/__init__.py")}
    found = {
        (file.relative_to(ROOT).as_posix().removeprefix("ort_dynamo/").split("/")[0], name.split(".")[1])
        for file in _sources("ort_dynamo", "passes")
        for name in _imports(file)
        if name.startswith("ort_dynamo.")
    }
    imports = {(a, b) for a, b in found if {a, b} <= folders and a != b}
    assert {"passes", "runtime", "training"} <= folders
    assert {("lowering", "graph"), ("passes", "graph")} <= imports
    assert len(imports) <= 110, f"{len(imports)} imports between {len(folders)} folders"
