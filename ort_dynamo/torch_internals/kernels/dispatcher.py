"""Control over the torch kernels that a call reaches while a compile traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

# Documented by torch as the way to see all calls; every tested version has it here.
from torch.utils._python_dispatch import TorchDispatchMode

from ort_dynamo.torch_internals.kernels.operators import OpOverload, is_absent
from ort_dynamo.torch_internals.lookup import private

__all__ = [
    "TorchDispatchMode",
    "add_traced_kernel",
    "as_traced",
    "forget_dispatch",
    "python_kernels",
    "real_kernels",
    "replace_traced_kernels",
    "sees_calls",
    "share_shapes",
    "without_python_kernels",
]

_disable_modes = private("torch.utils._python_dispatch:_disable_current_modes", nullcontext)
_disable_python_kernels = private("torch._C:_DisablePythonDispatcher", nullcontext)
_python_dispatcher = private("torch._dispatch.python:enable_python_dispatcher", nullcontext)
_disable_autocast = private("torch._C:_DisableAutocast", nullcontext)
_no_python_dispatcher = private("torch._dispatch.python:no_python_dispatcher", nullcontext)
sees_calls: Callable[[], int] = private("torch._C:_len_torch_dispatch_stack", lambda: 1)
"""Function that counts the modes, of torch's or of the program's, that see the calls made now; without an answer, one.

torch's own C function: it is asked at every run of a session.
"""
_dispatch_key = private("torch._C:DispatchKey")

_TRACING_KEYS: tuple[Any, ...] = tuple(
    getattr(_dispatch_key, name) for name in ("Autograd", "CompositeImplicitAutograd") if hasattr(_dispatch_key, name)
)
"""The dispatch keys at which torch registers decompositions that AOTAutograd cannot be told to leave out. Where torch
lacks a key there is nothing at it."""


@contextmanager
def real_kernels() -> Iterator[None]:
    """Run torch's own kernels on real tensors, without gradients, in the middle of a compilation.

    Without torch's switches for its modes and its Python kernels a call reaches the trace, and gives a fake tensor:
    code that asks for its numbers raises.
    """
    with ExitStack() as stack:
        stack.enter_context(_disable_modes())
        stack.enter_context(_disable_python_kernels())
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def as_traced() -> Iterator[None]:
    """Make calls on fake tensors reach the kernels that a trace reaches, without gradients and autocast.

    Without torch's switches a call under the program's autocast would cast once more.
    """
    with ExitStack() as stack:
        stack.enter_context(_disable_autocast())
        stack.enter_context(torch.no_grad())
        stack.enter_context(_python_dispatcher())
        yield


def python_kernels(overload: OpOverload) -> dict[Any, Callable[..., Any]]:
    """torch's Python kernels of an operator, by dispatch key, to be changed in place.

    Without the table it is empty: torch then traces its own decompositions.
    """
    kernels: dict[Any, Callable[..., Any]] | None = getattr(overload, "py_kernels", None)
    return {} if kernels is None else kernels


def without_python_kernels() -> AbstractContextManager[Any]:
    """Make calls reach torch's C++ kernels, not the Python ones, under the active modes.

    Without torch's switch nothing changes: a call that asks for it from within a Python kernel would come back to it.
    """
    switched: AbstractContextManager[Any] = _no_python_dispatcher()
    return switched


def forget_dispatch(overload: OpOverload) -> None:
    """Clear torch's dispatch cache, so that the next call reads `python_kernels` again; no-op without a cache."""
    cache = getattr(overload, "_dispatch_cache", None)
    if cache is not None:
        cache.clear()


def replace_traced_kernels(overload: OpOverload, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace each of an operator's decompositions by the result of `make` for it, for good.

    Those are replaced that AOTAutograd cannot be told to leave out. An operator that torch lacks has none.
    """
    if is_absent(overload):
        return
    table = python_kernels(overload)
    for key in _TRACING_KEYS:
        if key in table:
            table[key] = make(table[key])
    forget_dispatch(overload)


def add_traced_kernel(overload: OpOverload, kernel: Callable[..., Any]) -> None:
    """Add a decomposition to an operator that has none where traces look for it, for good."""
    for key in _TRACING_KEYS:
        _add_kernel(overload, key, kernel)


def share_shapes(source: OpOverload, overload: OpOverload) -> None:
    """Give an operator, for good, torch's shape function of another one, unless torch has one for it in Python."""
    key = getattr(_dispatch_key, "Meta", None)
    if not is_absent(source) and key in python_kernels(source):
        _add_kernel(overload, key, python_kernels(source)[key])


def _add_kernel(overload: OpOverload, key: Any, kernel: Callable[..., Any]) -> None:
    if not is_absent(overload) and key not in python_kernels(overload):
        python_kernels(overload)[key] = kernel
        forget_dispatch(overload)
