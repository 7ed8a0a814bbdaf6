"""Tensors to and from DLPack capsules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack as public_from_dlpack

from ort_dynamo.torch_internals.lookup import private

__all__ = ["from_dlpack", "to_dlpack"]


def _by_protocol(tensor: torch.Tensor) -> Any:
    return tensor.detach().__dlpack__()


def _choose() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return the plain C calls, if they take one argument and return the same tensor; else the public ones.

    All tested versions have the C calls. The public ones take ten times as long.
    """
    to, back = private("torch._C:_to_dlpack"), private("torch._C:_from_dlpack")
    if to is not None and back is not None:
        tensor = torch.ones(1)
        try:
            if back(to(tensor)).data_ptr() == tensor.data_ptr():
                return to, back
        except (TypeError, RuntimeError):  # another signature, or another kind of capsule: the public way is asked
            pass
    return _by_protocol, public_from_dlpack


to_dlpack: Callable[[torch.Tensor], Any]
from_dlpack: Callable[[Any], torch.Tensor]
to_dlpack, from_dlpack = _choose()
"""A tensor's memory as a capsule, to be taken once; a tensor on the memory of a capsule."""
