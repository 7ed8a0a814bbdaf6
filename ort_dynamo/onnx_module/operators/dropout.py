"""Dropout: active if the file enables it and the module is in train mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ort_dynamo.onnx_module.host_values import Host, Setting, number
from ort_dynamo.onnx_module.registry import onnx_operator

__all__: list[str] = []


@onnx_operator("Dropout")
def no_dropout(x: Tensor, *, ratio: float = 0.5) -> tuple[Tensor, Tensor]:
    """Before version 12 it was for inference, and drops nothing."""
    return x, torch.ones_like(x, dtype=torch.bool)


@onnx_operator("Dropout", 12)
def dropout(
    x: Tensor,
    ratio: Setting | None = None,
    training_mode: Setting | None = None,
    *,
    seed: int | None = None,
    training: bool,
    outputs: int,
) -> tuple[Tensor, Tensor]:
    """Drop with probability `ratio` and scale the rest, if `training_mode` is set and the module is in train mode.

    The random numbers come from torch's generator; `seed` is ignored.
    """
    rate = 0.5 if ratio is None else float(number(ratio))
    known = training_mode is None or isinstance(training_mode, Host)
    if not training or (known and (training_mode is None or not number(training_mode))):
        return x, torch.ones_like(x, dtype=torch.bool)
    if outputs == 1:
        dropped, mask = F.dropout(x, rate, True), x
    else:
        factors = F.dropout(torch.ones_like(x), rate, True)
        dropped, mask = x * factors, factors != 0
    if isinstance(training_mode, Tensor):
        wanted = torch.reshape(training_mode, ())
        return torch.where(wanted, dropped, x), torch.logical_or(mask != 0, ~wanted)
    return dropped, mask
