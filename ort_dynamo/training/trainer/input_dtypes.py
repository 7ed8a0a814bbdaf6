"""Name the trainer's input whose dtype torch refuses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ort_dynamo.errors import InputDtypeError, OrtDynamoError

__all__ = ["naming_inputs"]

_SPELLED = {
    torch.float64: "Double|double|Float64",
    torch.float32: "Float|float|Float32",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long|long|Int64",
    torch.int32: "Int|int|Int32",
    torch.int16: "Short|short",
    torch.int8: "Char|char|signed char",
    torch.uint8: "Byte|unsigned char",
    torch.bool: "Bool|bool",
}
"""dtype -> how torch's errors spell it."""


def naming_inputs(
    error: Exception, names: Sequence[str], inputs: Sequence[Tensor], parameters: Iterable[Tensor]
) -> Exception:
    """Give the error to raise for one that a step raised: with the inputs that have a dtype in its text, or itself.

    Args:
        error: what torch or a session raised.
        names: of the inputs, as model_desc has them.
        inputs: of the step.
        parameters: of the model: a dtype that these have is no mistake.
    """
    if isinstance(error, OrtDynamoError) or not isinstance(error, RuntimeError):
        return error
    usual = {parameter.dtype for parameter in parameters}
    named = [
        f"{name!r} is {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in zip(names, inputs, strict=False)
        if isinstance(tensor, Tensor) and tensor.dtype not in usual and _is_spelled(tensor.dtype, str(error))
    ]
    if not named:
        return error
    weights = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in usual))
    return InputDtypeError(error=error, inputs=", ".join(named), weights=weights or "none")


def _is_spelled(dtype: torch.dtype, text: str) -> bool:
    return dtype in _SPELLED and re.search(rf"\b(?:{_SPELLED[dtype]})\b", text) is not None
