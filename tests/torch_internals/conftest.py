"""Fixtures: torch's operators that the package names, and the package with some of them missing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import run_program

_PACKAGE = Path(__file__).parents[2] / "ort_dynamo"
_NAMESPACES = ("aten", "prims", "higher_order", "inductor_prims")

_EVERYTHING = """
import pkgutil, importlib
import ort_dynamo
for module in pkgutil.walk_packages(ort_dynamo.__path__, "ort_dynamo."):
    if not module.name.endswith("__main__") and ".demo" not in module.name:  # needs the packages of the extra demo
        importlib.import_module(module.name)
from ort_dynamo.lowering.registry import registered
from ort_dynamo.capture.decompositions.table import decompositions
decompositions()
"""


def _sources() -> list[Path]:
    return sorted(_PACKAGE.rglob("*.py", recurse_symlinks=True) if sys.version_info >= (3, 13) else _walk(_PACKAGE))


def _walk(folder: Path) -> list[Path]:
    return [p for entry in folder.iterdir() for p in (_walk(entry) if entry.is_dir() else [entry]) if p.suffix == ".py"]


@pytest.fixture(scope="session")
def trees() -> dict[Path, ast.Module]:
    """Every module of the package, parsed."""
    return {path: ast.parse(path.read_text()) for path in _sources()}


@pytest.fixture(scope="session")
def named_operators(trees: dict[Path, ast.Module]) -> list[str]:
    """List the operators named in the sources, as `aten.mul.Tensor` or `aten.mul`."""
    names: set[str] = set()
    for tree in trees.values():
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                parts = ast.unparse(node).split(".")
                if parts[0] in _NAMESPACES and all(map(str.isidentifier, parts)) and parts[-1] != "overloads":
                    names.add(".".join(parts[:3]))
    return sorted(names)


@pytest.fixture(scope="session")
def with_everything_imported() -> Callable[[str, str], str]:
    """Run a program in its own process, with `before` first, then the import of every module; return its output."""

    def run(before: str, after: str) -> str:
        program = "\n".join((before, _EVERYTHING, after))
        done = run_program(program)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run
