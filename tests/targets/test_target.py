"""Tests that only the target compares devices, packages and versions; other code reads named facts."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import ort_dynamo
from ort_dynamo.runtime.installed.providers import recorded_cpu_targets, recorded_cuda_targets
from ort_dynamo.targets.prices import CPU, CPU_TRAINING, CUDA, CUDA_FUSED
from ort_dynamo.targets.target import TRAINING_PACKAGE

ROOT = Path(ort_dynamo.__file__).parent
ALLOWED = {
    "targets/target.py",
    "runtime/installed/providers.py",
    "runtime/installed/capabilities.py",
    "runtime/installed/defects.py",
}


def compared(source: str) -> set[str]:
    """List attributes of a Target, or of a similar object, that the source compares or matches."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            sides = [node.subject]
        elif isinstance(node, ast.Subscript):
            sides = [node.slice]
        for side in sides:
            for part in ast.walk(side):
                if isinstance(part, ast.Attribute) and part.attr in ("device_type", "provider", "package"):
                    found.add(part.attr)
                if isinstance(part, ast.Attribute) and ast.unparse(part).endswith("target.version"):
                    found.add("version")
    return found


def test_only_the_target_compares_devices_and_versions() -> None:
    paths = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).as_posix() not in ALLOWED]
    assert len(paths) > 300
    found = {
        path: compared(path.read_text()) - ({"provider"} if path.name == "session.py" else set()) for path in paths
    }
    assert not {path: names for path, names in found.items() if names}, "ask a fact of the Target, or has_defect"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("ctx.target.device_type == 'cpu'", {"device_type"}),
        ("'cpu' != target.device_type", {"device_type"}),
        ("target.device_type in ('cpu',)", {"device_type"}),
        ("release(target.version) < (1, 27)", {"version"}),
        ("{'cpu': 1}[target.device_type]", {"device_type"}),
        ("tensor.device.type == 'cpu' and node.target == target", set()),
        ("f'{target.package} {target.version}'", set()),
    ],
)
def test_a_comparison_is_seen(source: str, found: set[str]) -> None:
    assert compared(source) == found


def test_each_kind_of_target_has_its_prices() -> None:
    for target in (*recorded_cpu_targets(), *recorded_cuda_targets()):
        cpu = CPU_TRAINING if target.package == TRAINING_PACKAGE else CPU
        assert target.prices is (CUDA if target.device_type == "cuda" else cpu)


def test_prices_are_not_in_a_targets_key() -> None:
    for target in recorded_cpu_targets():
        before = repr(target)
        assert target.prices is not None
        assert repr(target) == before
        assert "rices(" not in before


def test_norms_of_rows_are_in_sessions_where_kernels_are_fused() -> None:
    target = dataclasses.replace(recorded_cuda_targets()[-1], fuses_kernels=True)
    aten = torch.ops.aten
    assert target.prices is CUDA_FUSED
    assert CUDA_FUSED.kernels is not None
    assert CUDA.kernels is not None
    left = CUDA.kernels.normalizations.keys() - CUDA_FUSED.kernels.normalizations.keys()
    assert aten.native_layer_norm_backward.default in left
    assert aten.native_batch_norm_backward.default in CUDA_FUSED.kernels.normalizations
