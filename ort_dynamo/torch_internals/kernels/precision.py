"""The precision in which torch's kernels compute float32, by torch's settings."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["convolves_in_tf32"]


def convolves_in_tf32() -> bool:
    """Check whether cuDNN may compute convolutions of float32 by Tensor Cores, which is torch's default."""
    backends: Any = torch.backends  # the older names of the same raise where a program has used the newer ones
    return bool(backends.cudnn.conv.fp32_precision == "tf32")
