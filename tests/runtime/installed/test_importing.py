"""Importing ONNX Runtime leaves torch alone."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.utils.checkpoint

from ort_dynamo.runtime.installed.importing import onnxruntime, restore_torch


def test_torchs_functions_are_torchs_own() -> None:
    onnxruntime()
    restore_torch()  # another test may have imported onnxruntime itself
    for function in (torch.manual_seed, torch.cuda.manual_seed, torch.utils.checkpoint.checkpoint):
        assert "onnxruntime" not in function.__code__.co_filename, function


def test_a_program_that_imports_onnxruntime_first_trains_with_checkpoints() -> None:
    program = """
import onnxruntime
import torch, torch.utils.checkpoint

layer = torch.nn.Linear(4, 4)

@torch.compile(backend="ort_train", fullgraph=True)
def step(x):
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum()

step(torch.randn(2, 4)).backward()
print(layer.weight.grad.shape)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([4, 4])\n"
