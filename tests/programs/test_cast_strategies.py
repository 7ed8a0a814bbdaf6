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
    """Write a program, and put it under autocast if eager takes it there."""
    case, _ = write_case(seed, mode, "onnxruntime")
    body = tuple(replace(line, region="autocast 0") for line in case.program.body)
    cast = replace(case, program=replace(case.program, body=body, after=""))
    return case if cast.observe().raised else cast


def compiled(case: Case, **options: Any) -> Observed:
    torch.compiler.reset()
    dynamic = True if case.mode == "dynamic" else None
    options = {"placement": "onnxruntime", **options}
    return case.observe(
        compile_=lambda module: torch.compile(module, backend="ort_train", dynamic=dynamic, options=options)
    )


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] if n >= 9 else []) for n in range(270)])
def test_each_strategy_and_level_leaves_valid_models(seed: int, tmp_path: Path) -> None:
    strategy, level = SETTINGS[seed % len(SETTINGS)]
    case = autocast_case(seed, MODES[seed // len(SETTINGS) % len(MODES)])
    options = {"propagate_cast_ops_strategy": strategy, "propagate_cast_ops_level": level, "save_onnx": tmp_path}
    found = compiled(case, verify=True, **options)
    assert found.raised is None, f"{found.raised}\n{case.text()}"
    for path in tmp_path.rglob("*.onnx"):
        onnx.checker.check_model(path, full_check=True)
    if strategy == "NONE" or (strategy == "FLOOD_FILL" and level < 2):
        without = compiled(case, propagate_cast_ops_level=-1)
        torch.testing.assert_close(found.tensors, without.tensors, rtol=0, atol=0, equal_nan=True)
