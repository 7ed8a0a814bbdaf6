"""Importing ONNX Runtime leaves torch alone."""

from __future__ import annotations

import torch
import torch.utils.checkpoint

from ort_dynamo.runtime.importing import onnxruntime


def test_torchs_functions_are_torchs_own() -> None:
    onnxruntime()
    for function in (torch.manual_seed, torch.cuda.manual_seed, torch.utils.checkpoint.checkpoint):
        assert "onnxruntime" not in function.__code__.co_filename, function
