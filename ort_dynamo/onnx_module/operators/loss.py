"""Losses of classes."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ort_dynamo.onnx_module.host_values import Setting, Statistic, integer
from ort_dynamo.onnx_module.registry import MICROSOFT, onnx_operator

__all__: list[str] = []

_Reduction: TypeAlias = Literal["none", "mean", "sum"]

_NO_CLASS = -100
"""The target that torch ignores by default: no class has this number."""


@onnx_operator("NegativeLogLikelihoodLoss")
def nll_loss(
    x: Tensor,
    target: Tensor,
    weight: Statistic | None = None,
    *,
    ignore_index: int | None = None,
    reduction: _Reduction = "mean",
) -> Tensor:
    """Minus the log-probability (N, C, …) of the target class (N, …), weighted by class."""
    ignored = _NO_CLASS if ignore_index is None else ignore_index
    return F.nll_loss(x, target.to(torch.int64), weight, ignore_index=ignored, reduction=reduction)


@onnx_operator("SoftmaxCrossEntropyLoss")
def cross_entropy(
    scores: Tensor,
    labels: Tensor,
    weights: Statistic | None = None,
    *,
    ignore_index: int | None = None,
    reduction: _Reduction = "mean",
) -> tuple[Tensor, Tensor]:
    """Return the same of scores that are no log-probabilities yet, and these."""
    log_probabilities = torch.log_softmax(scores, 1)
    return nll_loss(
        log_probabilities, labels, weights, ignore_index=ignore_index, reduction=reduction
    ), log_probabilities


@onnx_operator("SoftmaxCrossEntropyLossInternal", 1, MICROSOFT)
def cross_entropy_internal(
    scores: Tensor,
    labels: Tensor,
    weights: Statistic | None = None,
    ignore_index: Setting | None = None,
    *,
    reduction: _Reduction = "mean",
    output_type: int | None = None,
) -> tuple[Tensor, Tensor]:
    """ONNX Runtime's form of it, where the ignored class is an input."""
    ignored = None if ignore_index is None else integer(ignore_index)
    return cross_entropy(scores, labels, weights, ignore_index=ignored, reduction=reduction)
