"""FP16_Optimizer: accepted, and gives back the optimizer that it gets."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

__all__ = ["FP16_Optimizer"]

_Optimizer = TypeVar("_Optimizer")


def FP16_Optimizer(optimizer: _Optimizer, **kwargs: Any) -> _Optimizer:  # noqa: N802  # ORTModule's name
    """Give back an optimizer as it is, with a warning.

    ORTModule replaced slow parts of DeepSpeed 0.9's, Megatron 1.1.5's and Apex's optimizers for float16, by their
    source. torch.amp.GradScaler does the same, in fused kernels.

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
