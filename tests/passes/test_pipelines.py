"""Passes stand alone, and pipelines.py runs them all."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir
import pytest
from torch.fx.passes.infra.pass_base import PassBase

from ort_dynamo.passes import pipelines

FOLDER = Path(pipelines.__file__).parent
MODULES = [
    f"ort_dynamo.passes.{file.relative_to(FOLDER).with_suffix('').as_posix().replace('/', '.')}"
    for kind in ("fx", "onnx")
    for file in [*sorted(FOLDER.glob(f"{kind}/*.py")), *sorted(FOLDER.glob(f"{kind}/cast_propagation/*.py"))]
    if file.stem != "__init__"
]


def imported(module: str) -> Iterator[str]:
    path = FOLDER.joinpath(*module.split(".")[2:]).with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def passes(module: str) -> list[type]:
    return [
        value
        for value in vars(importlib.import_module(module)).values()
        if isinstance(value, type) and issubclass(value, (PassBase, ir.passes.PassBase)) and value.__module__ == module
    ]


@pytest.mark.parametrize("module", [module for module in MODULES if passes(module)])
def test_a_pass_is_frozen_and_is_run_by_pipelines(module: str) -> None:
    assert module in imported("ort_dynamo.passes.pipelines")
    for pass_ in passes(module):
        assert dataclasses.is_dataclass(pass_)
        assert pass_.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_there_are_passes_to_look_at() -> None:
    assert {"ort_dynamo.passes.fx.copy_small_results", "ort_dynamo.passes.onnx.restore_order"} <= {
        module for module in MODULES if passes(module)
    }


def test_modules_shared_by_passes_import_no_pass() -> None:
    shared = [module for module in MODULES if not passes(module)]
    for kind in ("fx", "onnx"):
        shared += [f"ort_dynamo.passes.{kind}.analysis.{file.stem}" for file in FOLDER.glob(f"{kind}/analysis/*.py")]
    with_pass = {module for module in MODULES if passes(module)}
    assert {module: found for module in shared if (found := with_pass & set(imported(module)))} == {}
