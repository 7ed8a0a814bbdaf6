"""Runs two ONNX models on the same inputs, and compares them: as the files that repeat a fault of a pass do."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import onnx_ir as ir
import torch

from ort_dynamo.graph.build import built_of
from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime.compiled_graph import open_graph
from ort_dynamo.runtime.installed.providers import usable_target
from ort_dynamo.verification.compare import first_problem, largest

__all__ = ["compare_models"]


def compare_models(before: Path, inputs: Path, after: Path | Literal["optimized"]) -> str:
    """Say how the results of two models differ; nothing where they agree.

    Args:
        before: the model that is right, which runs without ONNX Runtime's optimizers.
        inputs: the tensors that both read, saved by torch.
        after: the other model, which runs in the same way, or the first one with the optimizers.
    """
    given = torch.load(inputs)
    expected = _run(before, given, "disable")
    found = _run(before, given, "all") if after == "optimized" else _run(after, given, "disable")
    return first_problem(found, expected, lambda: [None] * len(expected), scale=largest(expected))


def _run(path: Path, inputs: list[torch.Tensor], level: Literal["disable", "all"]) -> tuple[torch.Tensor, ...]:
    settings = SessionOptions(graph_optimization=level).resolved()
    built = built_of(path.stem, ir.load(path), settings)
    compiled = open_graph(built, usable_target("cpu"), torch.device("cpu"))
    return compiled.run(*inputs)
