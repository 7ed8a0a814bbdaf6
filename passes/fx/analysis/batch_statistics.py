"""BatchNorm in training, with and without its running statistics."""

from __future__ import annotations

from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["SHARED", "WITHOUT_RUNNING", "WITH_RUNNING"]

WITH_RUNNING = aten._native_batch_norm_legit_functional.default
"""Gives a result, the batch's mean and reciprocal deviation, and new running statistics."""

WITHOUT_RUNNING = aten._native_batch_norm_legit.no_stats

SHARED = 3
"""Result, mean, reciprocal deviation: the first outputs of both, which do not depend on the running statistics."""
