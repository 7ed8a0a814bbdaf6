"""Runs a model that is a file, once, as any program with ONNX Runtime would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ort_dynamo.graph.build import BuildRecord, BuiltGraph
from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.installed.providers import usable_target
from ort_dynamo.runtime.session import optimize

__all__ = ["optimized_model", "run_model"]


def run_model(model: bytes, inputs: Mapping[str, Any]) -> list[Any]:
    """Return the outputs of a model on the CPU, as arrays, for inputs that are arrays."""
    settings = onnxruntime().SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime().InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    return session.run(None, dict(inputs))


def optimized_model(model: bytes) -> bytes:
    """Return a model as ONNX Runtime's optimizers leave it for this machine's CPU; raises SessionError."""
    device = torch.device("cpu")
    built = BuiltGraph(
        name="training",
        model=model,
        inputs=(),
        outputs=(),
        session=SessionOptions().resolved(),
        dtypes=frozenset(),
        in_order=False,
        keyable=False,
        origins={},
        record=BuildRecord(0, (), {}),
    )
    return optimize(built, usable_target(device.type), device)
