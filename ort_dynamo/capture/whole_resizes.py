"""Keep resizes and shrinks whole while AOTAutograd traces; torch decomposes them before any decomposition table.

torch registers Python decompositions of its resizing operators at the Autograd key. A backend would get four or sixteen
gathers and, in the backward, as many scatters that add. A whole resize and its gradient are a matmul with a small
matrix per axis. A whole shrink is two to four operators without a Where, which is slow in CPU sessions. Integers keep
torch's decomposition. So do symbolic sizes, for which torch has no shape functions of these operators, and calls
within transforms of torch.func, which need the Python kernels.

The decompositions are in tables of the process, and other threads may trace at the same time. So the import of this
module replaces each one by a kernel. It does the same as the decomposition, unless its thread is inside
`whole_resizes()`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ort_dynamo.capture.thread_switch import ThreadSwitch
from ort_dynamo.torch_internals.kernels.decompositions import resized_lengths
from ort_dynamo.torch_internals.kernels.dispatcher import replace_traced_kernels, without_python_kernels
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, is_absent
from ort_dynamo.torch_internals.sizes.symbols import has_symbolic_sizes
from ort_dynamo.torch_internals.tracing.wrappers import transform_level

__all__ = ["whole_resizes"]

_Kernel = Callable[..., torch.Tensor]

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

_SHRINKS = (aten.softshrink.default, aten.hardshrink.default)


class _Thread(threading.local):
    """State of this thread's tracing.

    Attributes:
        inside: the resize that is on its way to torch's own kernel.
    """

    inside: OpOverload | None = None


_thread, _whole = _Thread(), ThreadSwitch()


def whole_resizes() -> AbstractContextManager[None]:
    """Trace resizes and shrinks of floating-point tensors with fixed sizes whole, in this thread, while it is open."""
    return _whole.on()


def _install() -> None:
    """Replace torch's decompositions by our kernels, permanently."""
    for packet in _RESIZES:
        if not is_absent(packet.default):
            replace_traced_kernels(packet.vec, partial(_vec, packet.default))
            replace_traced_kernels(packet.default, partial(_default, packet.default, _is_fixed))
    for overload in _SHRINKS:
        replace_traced_kernels(overload, partial(_default, overload, _is_fixed_shrink))


def _vec(default: OpOverload, original: _Kernel) -> _Kernel:
    """Make a kernel that calls `default`, which takes sizes and factors, for the overload that takes either."""

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not _whole.is_on or kwargs:
            return original(*args, **kwargs)
        self, output_size, *flags, factors = args
        sizes = resized_lengths(self.shape, output_size, factors)
        if not _is_fixed(self, sizes):
            return original(*args)
        result: torch.Tensor = default(self, sizes, *flags, *(factors or [None] * len(sizes)))
        return result

    return kernel


def _default(overload: OpOverload, keeps: Callable[..., bool], original: _Kernel) -> _Kernel:
    """Make a kernel that calls torch's C++ kernel of `overload` if `keeps`, else its decomposition."""

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _thread.inside is overload:
            return NotImplemented  # a mode has asked for a decomposition, and is told so that there is none
        if not _whole.is_on or kwargs or transform_level() is not None or not keeps(*args[:2]):
            return original(*args, **kwargs)
        before, _thread.inside = _thread.inside, overload
        try:
            with without_python_kernels():  # torch's own kernels, which record a gradient
                result: torch.Tensor = overload(*args)
        finally:
            _thread.inside = before
        return result

    return kernel


def _is_fixed(self: torch.Tensor, output_size: Sequence[int]) -> bool:
    # A symbolic or empty batch counts too: torch cannot infer the shapes of a whole resize with one.
    sizes = [*self.shape, *output_size]
    return (
        self.is_floating_point()
        and not has_symbolic_sizes(self)
        and not any(isinstance(size, torch.SymInt) or size == 0 for size in sizes)
    )


def _is_fixed_shrink(self: torch.Tensor, lambd: Any = 0.5) -> bool:
    return isinstance(lambd, (int, float)) and _is_fixed(self, ())


_install()
