"""The table of ONNX Runtime's defects names their workarounds, and the code asks for no other defect."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import ort_dynamo
from ort_dynamo.runtime.installed.defects import DEFECTS, Builds, Defect, defects_of
from ort_dynamo.torch_internals.release import release

ROOT = Path(ort_dynamo.__file__).parent
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@cache
def asked() -> dict[str, set[str]]:
    """Module, from `ort_dynamo/` -> the names that it asks targets for."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "has_defect":
                (name,) = call.args
                assert isinstance(name, ast.Constant), f"{path}: has_defect takes a name as it stands in the table"
                found.setdefault(path.relative_to(ROOT).as_posix(), set()).add(name.value)
    return found


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_who_works_around_a_defect_names_it(defect: Defect) -> None:
    asking = {module for module, names in asked().items() if defect.name in names}
    if not defect.everywhere:
        assert asking == set(defect.avoided_by)
    else:
        assert not asking
        for module in defect.avoided_by:
            assert f"defect {defect.name}" in (ROOT / module).read_text().replace("Defect ", "defect "), module


def test_no_lowering_reduces_an_axis_that_counts_from_the_end() -> None:
    # Defect last_axis_of_nothing.
    calls = [
        (path.relative_to(ROOT).as_posix(), node.lineno, argument)
        for path in sorted(ROOT.rglob("lowering/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("Reduce")
        for argument in node.args[1:2]
    ]
    assert calls
    assert [call[:2] for call in calls if "-" in ast.unparse(call[2])] == []


def test_every_name_that_is_asked_for_is_a_row() -> None:
    names = [defect.name for defect in DEFECTS]
    assert len(names) == len(set(names))
    assert set().union(*asked().values()) <= set(names)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_one_of_a_build_that_is_supported(defect: Defect) -> None:
    builds = [("onnxruntime-training", "1.19.2"), *(("onnxruntime", f"1.{minor}.0") for minor in range(28, 40))]
    assert any(defect.name in defects_of(*build, provider) for build in builds for provider in (CPU, CUDA))


def test_builds_are_told_apart_by_package_release_and_provider() -> None:
    assert "int64_order" in defects_of("onnxruntime", "1.31.1", CPU)
    assert "int64_order" in defects_of("onnxruntime-gpu", "1.31.1", CPU)
    assert "int64_order" not in defects_of("onnxruntime", "1.31.1", CUDA)
    assert "int64_order" not in defects_of("onnxruntime-training", "1.19.2", CPU)
    mended = Builds(training=False, since=(1, 9), before=(1, 30))
    answers = {version: mended.include("onnxruntime", version) for version in ("1.8.1", "1.9.0", "1.29.4", "1.30.0")}
    assert answers == {"1.8.1": False, "1.9.0": True, "1.29.4": True, "1.30.0": False}
    assert release("1.31.0.dev20260101") == release("1.31rc2+cu130") == (1, 31)
