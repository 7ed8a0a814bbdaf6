"""Compares a model in torch with its ONNX file: debug.check_model_export."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from torch import Tensor

from ort_dynamo.embedding import run_model
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.trainer.files import StepFiles
from ort_dynamo.training.trainer.running import RunningModel

__all__ = ["check_export"]

_MESSAGE = (
    "Mismatch between outputs of PyTorch model and exported ONNX model, at {name}. "
    "Note that different backends may exhibit small computational differences. "
    "If this is within acceptable margin, or if there is random generator in the model causing inevitable mismatch, "
    "you can proceed training by setting the flag debug.check_model_export to False."
)


def check_export(
    running: RunningModel, files: StepFiles, description: _ORTTrainerModelDesc, inputs: Sequence[Tensor]
) -> None:
    """Compare a model's own outputs, without dropout, with those of its ONNX file.

    Raises:
        AssertionError: they differ by more than 1e-6 + 1e-2 of the file's.
    """
    expected = running.evaluate_in_torch(inputs)
    model = ir.to_proto(files.forward(inputs)).SerializeToString()
    given = {one.name: tensor.cpu().numpy() for one, tensor in zip(description.inputs, inputs, strict=True)}
    for own, found, described in zip(expected, run_model(model, given), description.outputs, strict=True):
        is_float = own.is_floating_point()
        np.testing.assert_allclose(
            (own.float() if is_float else own).cpu().numpy(),
            found.astype(np.float32) if is_float else found,
            rtol=1e-2,
            atol=1e-6,
            err_msg=_MESSAGE.format(name=described.name),
        )
