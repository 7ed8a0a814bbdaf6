"""torch's fused optimizer kernels, which torch.optim calls with fused=True."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["fused_adamw"]


def _fused_adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    *,
    count: float,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    divisor: Tensor | None,
) -> None:
    """Update weights and moments in place by AdamW, in one walk over memory; torch.optim.AdamW has the formula.

    Args:
        weights: the weights.
        gradients: their gradients, which are overwritten where there is a divisor.
        first: first moments.
        second: second moments.
        count: how many updates there are with this one.
        lr: the learning rate.
        beta1: the first moment's decay.
        beta2: the second's.
        weight_decay: λ: weights are first multiplied by 1 - lr·λ.
        eps: added to the denominator.
        divisor: gradients are divided by it first; 0-d.
    """
    step = torch.full((), count, dtype=torch.float32, device=weights[0].device)
    torch._fused_adamw_(
        list(weights),
        list(gradients),
        list(first),
        list(second),
        [],
        [step] * len(weights),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None if divisor is None else divisor.float(),
        found_inf=None,
    )


fused_adamw = _fused_adamw if hasattr(torch, "_fused_adamw_") else None
"""AdamW's kernel; None where torch has none, and the formulae run operator by operator. All tested versions have it."""
