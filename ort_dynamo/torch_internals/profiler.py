"""torch's profiler: whether one records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.autograd import profiler

__all__ = ["NO_PROFILER", "PROFILER"]

NO_PROFILER: Any = SimpleNamespace(_is_profiler_enabled=False)
"""Stands for torch's module while none records."""

PROFILER: Any = profiler if hasattr(profiler, "_is_profiler_enabled") else NO_PROFILER
"""Its attribute `_is_profiler_enabled` is True while a profiler of torch's records.

Without torch's variable it is always False, and no profile shows spans.
"""
