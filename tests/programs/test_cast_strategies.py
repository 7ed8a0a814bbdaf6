"""Programs under autocast, with each strategy and level of cast propagation: a valid model after each pass."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from program_comparison import MODES, Case
from program_run import Observed
from program_writer import write_case

STRATEGIES = ("NONE", "INSERT_AND_REDUCE", "FLOOD_FILL")
SETTINGS = [*itertools.product(STRATEGIES, (0, 1, 2))]


def autocast_case(seed: int, mode: str) -> Case:
    """Write a program, and put all of it under autocast."""
    case, _ = write_case(seed, mode, "onnxruntime")
    body = tuple(replace(line, region="autocast 0") for line in case.program.body)
    return replace(case, program=replace(case.program, body=body, after=""))


def compiled(case: Case, backend: str = "ort_train", **options: Any) -> Observed:
    torch.compiler.reset()
    given = {"dynamic": True if case.mode == "dynamic" else None, "options": options or None}
    return case.observe(compile_=lambda module: torch.compile(module, backend=backend, **given))


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] if n >= 9 else []) for n in range(270)])
def test_each_strategy_and_level_leaves_valid_models(seed: int, tmp_path: Path) -> None:
    strategy, level = SETTINGS[seed % len(SETTINGS)]
    case = autocast_case(seed, MODES[seed // len(SETTINGS) % len(MODES)])
    options = {"placement": "onnxruntime", "cast_strategy": {"strategy": strategy, "level": level}}
    found = compiled(case, debug={"verify": True}, save_onnx=tmp_path, **options)
    if found.raised and compiled(case, "aot_eager").raised:
        pytest.skip("torch does not take this program under autocast")
    assert found.raised is None, f"{found.raised}\n{case.text()}"
    for path in tmp_path.rglob("*.onnx"):
        onnx.checker.check_model(path, full_check=True)
    if strategy == "NONE" or (strategy == "FLOOD_FILL" and level < 2):
        without = compiled(case, **{**options, "cast_strategy": {"strategy": strategy, "level": -1}})
        torch.testing.assert_close(found.tensors, without.tensors, rtol=0, atol=0, equal_nan=True)
