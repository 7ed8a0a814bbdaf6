"""Dtypes of the results of torch's kernels, where fake tensors say other ones: the one table.

By torch's source: `is_mixed_type` in native/cpu/mixed_data_type.h and its callers in native/Normalization.cpp,
native/layer_norm.cpp and native/group_norm.cpp; `toAccumulateType` in native/cuda/Normalization.cu and
native/cuda/layer_norm_kernel.cu; the dispatch over the input's dtype in native/cuda/group_norm_kernel.cu.
`tests/torch_internals/test_kernel_dtypes.py` runs each operator on a CPU. No device has shown those of CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, present

__all__ = ["running_dtypes", "statistics_dtype"]

_AS_INPUT: frozenset[object] = frozenset(present({aten.native_group_norm.default: None}))
"""Operators whose kernels on CUDA keep statistics in the input's dtype."""

_RUNNING: Mapping[OpOverload, Mapping[int, int]] = present(
    {
        aten._native_batch_norm_legit_functional.default: {3: 3, 4: 4},
        aten._batch_norm_with_update_functional.default: {4: 3, 5: 4},
    }
)
"""Operator -> index of a result that holds running statistics -> index of the argument that it is a copy of."""


def statistics_dtype(target: object, given: Sequence[Any]) -> torch.dtype:
    """Return the dtype in which torch's kernel gives the statistics of a normalization, and its gradient reads them.

    Args:
        target: the normalization's overload.
        given: its arguments; tensors may be fake.
    """
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    own, wide = tensors[0].dtype, torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].device.type != "cpu":
        return own if target in _AS_INPUT else wide
    return own if len(tensors) == 1 or tensors[1].dtype == own else wide


def running_dtypes(target: OpOverload, given: Sequence[Any]) -> dict[int, torch.dtype]:
    """Return the dtypes of new running statistics, by result: those of the old ones, which torch's kernel writes over.

    Fake tensors have the dtype of a sum with the batch's statistics.
    """
    return {
        result: given[argument].dtype
        for result, argument in _RUNNING.get(target, {}).items()
        if isinstance(given[argument], torch.Tensor)
    }
