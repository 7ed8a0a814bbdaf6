"""Compiles that leave no trace in the program's own compiles."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ort_dynamo.torch_internals.lookup import private

__all__ = ["compile_apart", "untouched"]

_pgo = private("torch._dynamo.pgo")
_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def compile_apart(function: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    """Compile a function by torch.compile with separate cache entries, which do not count toward other limits.

    Args:
        function: a function or module.
        given: the keyword arguments of torch.compile.
    """
    apart: Any = {"isolate_recompiles": True} if _ISOLATES else {}  # older torch has no such parameter
    return torch.compile(function, **given, **apart)


@contextmanager
def untouched() -> Iterator[None]:
    """Restore Dynamo's knowledge of sizes afterwards, so that the next compile of the program is as static as it was.

    torch before 2.13 cannot keep entries apart: everything compiled is forgotten there (torch.compiler.reset()).
    """
    if not _ISOLATES:
        torch.compiler.reset()
    state = getattr(_pgo, "_CODE_STATE", None)
    if state is not None:
        _pgo._CODE_STATE = copy.deepcopy(state)
    try:
        yield
    finally:
        if _ISOLATES:
            if hasattr(_pgo, "_CODE_STATE"):
                _pgo._CODE_STATE = state
        else:
            torch.compiler.reset()
