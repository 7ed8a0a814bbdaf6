"""Tensors that are more than their memory shows, or have none: dual, batched, fake, functional and sparse tensors.

Most of them exist only while torch transforms a function: while a level of forward-mode differentiation, an
interpreter of functorch or a dispatch mode is open. Three cheap questions tell that none is. The others are plain to
torch's guards on inputs, and can come as a tangent of a backward, which nothing guards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad

from ort_dynamo.torch_internals.lookup import private

__all__ = ["DUAL_LEVEL", "are_plain", "is_batched", "transform_level", "zeros_in_memory"]

DUAL_LEVEL: Any = forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=0)
"""Its attribute `_current_level` is -1 while no level of forward-mode differentiation is open.

Without torch's variable it is always 0, and each call looks at all of its inputs.
"""

transform_level: Callable[[], int | None] = private("torch._C._functorch:maybe_current_level", lambda: None)
"""The level of functorch's innermost transform, such as vmap; None while there is none.

Without torch's function, None: a wrapped tensor then stops the session that gets it.
"""

_is_transformed = private("torch._C._functorch:is_functorch_wrapped_tensor", lambda tensor: False)
_is_batched = private("torch._C._functorch:is_batchedtensor", lambda tensor: False)
_is_legacy_batched = private("torch._C._functorch:is_legacy_batchedtensor", lambda tensor: False)
_has_storage = private("torch._C:_has_storage", lambda tensor: True)
_no_dispatch = private("torch._C:_disabled_torch_dispatch_impl")


def are_plain(values: Iterable[Any]) -> bool:
    """Check whether a session can read everything that these values hold; a scalar is plain."""
    if transform_level() is not None:
        return False  # random numbers depend on the transform, too
    return all(not isinstance(value, torch.Tensor) or _is_plain(value) for value in values)


def _is_plain(tensor: torch.Tensor) -> bool:
    if getattr(type(tensor), "__torch_dispatch__", _no_dispatch) is not _no_dispatch:
        return False
    if _is_transformed(tensor) or _is_legacy_batched(tensor) or not _has_storage(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    if tensor.numel() and not tensor.data_ptr():  # functional tensors, and zeros that have no memory
        return False
    return forward_ad.unpack_dual(tensor).tangent is None  # type: ignore[no-untyped-call]


def is_batched(tensor: torch.Tensor) -> bool:
    """Check whether vmap, functorch's or the one of torch.autograd, maps over the tensor or over its tangent."""
    if _is_batched(tensor) or _is_legacy_batched(tensor):
        return True
    tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent is not None and bool(_is_batched(tangent) or _is_legacy_batched(tangent))


def zeros_in_memory(compiled: Callable[..., Any], example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Give a compiled graph copies of those inputs that are zeros without memory.

    torch's guards tell these from other tensors, so that the inputs of each call are as the examples are.
    """
    found = [index for index, one in enumerate(example_inputs) if isinstance(one, torch.Tensor) and _is_zero(one)]
    if not found:
        return compiled

    def copied(*inputs: Any) -> Any:
        given = list(inputs)
        for index in found:
            given[index] = given[index].clone()
        return compiled(*given)

    return copied


def _is_zero(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, "_is_zerotensor", lambda: False)())
