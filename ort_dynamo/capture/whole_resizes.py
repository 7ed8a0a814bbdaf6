"""Operators that torch decomposes before any table is asked, kept whole while AOTAutograd traces.

torch registers Python decompositions of its resizing operators at the Autograd key: what reaches a backend are four or
sixteen gathers and, backward, as many scatters that add. Kept whole, a resize and its gradient are a product with a
small matrix for each axis. With symbolic sizes, and for integers, torch's decomposition stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size
from torch._ops import OpOverload

__all__ = ["whole_resizes"]

aten = torch.ops.aten

_Kernel = Callable[..., torch.Tensor]
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)

_RESIZES = (
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
    aten.upsample_linear1d,
    aten.upsample_bilinear2d,
    aten.upsample_trilinear3d,
    aten.upsample_bicubic2d,
)


@contextmanager
def whole_resizes() -> Iterator[None]:
    """While it is open, resizes of floating-point tensors with fixed sizes are traced whole.

    The Python dispatcher's tables are global, so open it around compilation only, which Dynamo's lock guards.
    """
    with ExitStack() as stack:
        for packet in _RESIZES:
            stack.enter_context(_kernels(packet.vec, functools.partial(_vec, packet.default)))
            stack.enter_context(_kernels(packet.default, functools.partial(_default, packet.default)))
        yield


@contextmanager
def _kernels(overload: OpOverload, replace: Callable[[_Kernel], _Kernel | None]) -> Iterator[None]:
    """Each Python kernel of `overload` replaced, or removed where `replace` gives None."""
    table = overload.py_kernels
    originals = {key: table[key] for key in _KEYS if key in table}
    for key, original in originals.items():
        replacement = replace(original)
        if replacement is None:
            del table[key]
        else:
            table[key] = replacement
    overload._dispatch_cache.clear()
    try:
        yield
    finally:
        table.update(originals)
        overload._dispatch_cache.clear()


def _vec(default: OpOverload, original: _Kernel) -> _Kernel:
    """The overload that takes an output size or scale factors, as the one that takes both."""

    def kernel(self: torch.Tensor, output_size: Sequence[int] | None, *rest: Any) -> torch.Tensor:
        *flags, factors = rest
        sizes = upsample_compute_output_size(self.shape, output_size, factors)  # type: ignore[no-untyped-call]
        if not _is_fixed(self, sizes):
            return original(self, output_size, *rest)
        result: torch.Tensor = default(self, sizes, *flags, *(factors or [None] * len(sizes)))
        return result

    return kernel


def _default(overload: OpOverload, original: _Kernel) -> _Kernel:
    def kernel(self: torch.Tensor, output_size: Sequence[int], *rest: Any) -> torch.Tensor:
        if not _is_fixed(self, output_size):
            return original(self, output_size, *rest)
        with _kernels(overload, lambda _: None):  # torch's own kernels, which record a gradient
            result: torch.Tensor = overload(self, output_size, *rest)
        return result

    return kernel


def _is_fixed(self: torch.Tensor, output_size: Sequence[int]) -> bool:
    # A symbolic or empty batch counts too: torch cannot infer the shapes of a whole resize with one.
    sizes = [*self.shape, *output_size]
    return self.is_floating_point() and not any(isinstance(size, torch.SymInt) or size == 0 for size in sizes)
