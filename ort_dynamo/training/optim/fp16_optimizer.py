"""FP16_Optimizer: accepted, and returns its optimizer unchanged."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

__all__ = ["FP16_Optimizer"]

_Optimizer = TypeVar("_Optimizer")


def FP16_Optimizer(optimizer: _Optimizer, **kwargs: Any) -> _Optimizer:  # noqa: N802  # ORTModule's name
    """Return an optimizer unchanged, with a warning.

    ORTModule replaced slow parts of the float16 optimizers of DeepSpeed 0.9, Megatron 1.1.5 and Apex.
    torch.amp.GradScaler does the same in fused kernels.

    Args:
        optimizer: any optimizer.
        kwargs: accepted, without effect.
    """
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    warnings.warn(
        f"Skip modifying optimizer because of optimizer name not found in the registry: {name}. "
        "torch.amp.GradScaler scales the loss, unscales gradients and skips steps that overflow.",
        UserWarning,
        stacklevel=2,
    )
    return optimizer
