"""AOTAutograd traces the two margin losses over classes as eager computes them.

torch's own decompositions differ from eager. Up to torch 2.13, that of `multilabel_margin_loss` counts the padding, -1
and all after it, as label 0; it never checks labels after a -1. Both give a gradient to a margin of exactly 0, and one
NaN makes the whole row NaN. Without a reduction, the loss of a single row has a dimension too many.

Those decompositions stand in tables of the process, and other threads may trace at the same time. So when this module
is imported, a kernel takes the place of each. It calls the decomposition, unless its own thread is inside
`margin_losses()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ort_dynamo.capture.thread_switch import ThreadSwitch
from ort_dynamo.torch_internals.kernels.dispatcher import replace_traced_kernels
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten

__all__ = ["MARGIN_LOSSES", "margin_losses"]

_NONE, _MEAN = 0, 1  # values of `reduction`; 2 is a sum


_as_eager = ThreadSwitch()


def margin_losses() -> AbstractContextManager[None]:
    """Trace margin losses as eager computes them, in this thread, while the context is open."""
    return _as_eager.on()


def _multi_margin_loss(
    self: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """Return the sum of max(0, margin - x[y] + x[i])^p / classes over all classes i but the label y."""
    _check(p in (1, 2), "only p == 1 and p == 2 supported")
    _check_rows(self)
    rows, labels = _rows(self), target if target.dim() else target.reshape(1)
    _check(
        labels.dim() == 1 and labels.shape[0] == rows.shape[0],
        f"inconsistent target size, expected {rows.shape[0]} but got {target.shape}",
    )
    index, places = labels.unsqueeze(1), torch.arange(rows.shape[1], device=self.device)
    margins = margin - rows.gather(1, index) + rows
    losses = torch.where((places != index) & (margins > 0), margins, 0)
    losses = losses if p == 1 else losses * losses
    if weight is not None:
        _check(
            weight.dim() <= 1 and weight.numel() == rows.shape[1],
            f"inconsistent weight size, expected {rows.shape[1]} but got {weight.shape}",
        )
        losses = losses * weight.reshape(-1)[index]
    return _reduced(losses.sum(1) / rows.shape[1], target.shape, reduction)


def _multilabel_margin_loss_forward(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Return the sum of max(0, 1 - x[y] + x[i]) / classes over all labels y and all classes i that are no label.

    Labels end at the first -1. The second result has 1 at the classes that are labels.
    """
    _check_rows(self)
    _check(self.shape == target.shape, f"inconsistent target size: {target.shape} for input of size: {self.shape}")
    rows, labels = _rows(self), _rows(target)
    classes = rows.shape[1]
    places, ends = torch.arange(classes, device=self.device), labels == -1
    counted = (places < torch.where(ends, places, classes).amin(-1, keepdim=True)).unsqueeze(-1)
    is_label = (counted & (labels.unsqueeze(-1) == places)).any(1)
    scores = rows.gather(1, torch.where(ends, 0, labels))  # this refuses any other label that is no class, as eager
    margins = 1 - scores.unsqueeze(-1) + rows.unsqueeze(1)
    losses = torch.where(counted & ~is_label.unsqueeze(1) & (margins > 0), margins, 0)
    loss = _reduced(losses.sum((1, 2)) / classes, target.shape[:-1], reduction)
    return loss, is_label.to(self.dtype).reshape(target.shape)


def _rows(values: Tensor) -> Tensor:
    return values if values.dim() == 2 else values.reshape(1, -1)


def _reduced(losses: Tensor, shape: torch.Size, reduction: int) -> Tensor:
    if reduction == _NONE:
        return losses.reshape(shape)
    return losses.mean() if reduction == _MEAN else losses.sum()


def _check_rows(self: Tensor) -> None:
    _check(
        self.dim() == 0 or (self.dim() <= 2 and self.shape[-1] != 0),
        f"Expected non-empty vector or matrix with optional 0-dim batch size, but got: {self.shape}",
    )


def _check(holds: bool, otherwise: str) -> None:
    torch._check(holds, lambda: otherwise)  # type: ignore[no-untyped-call]


MARGIN_LOSSES: Mapping[OpOverload, Callable[..., Any]] = {
    aten.multi_margin_loss.default: _multi_margin_loss,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss_forward,
}
"""Overload -> its formula, with the overload's own arguments."""


def _either(formula: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel that computes the formula inside `margin_losses()`, else torch's decomposition."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return (formula if _as_eager.is_on else original)(*args, **kwargs)

    return kernel


def _install() -> None:
    """Replace torch's decompositions by our kernels, permanently."""
    for overload, formula in MARGIN_LOSSES.items():
        replace_traced_kernels(overload, partial(_either, formula))


_install()
