"""Compiles that leave no trace in the program's own compiles."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ort_dynamo.torch_internals.lookup import private
from ort_dynamo.torch_internals.tracing.dynamo import counters

__all__ = ["compile_apart", "in_eager", "released", "untouched"]

_pgo = private("torch._dynamo.pgo")
_dynamo_utils = private("torch._dynamo.utils")
_operators = private("torch._higher_order_ops.utils")
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
def in_eager() -> Iterator[None]:
    """Run in eager mode all that torch.compile has compiled.

    Operators such as torch.cond have gradients only through a compile of their own, by torch's backend "eager"; it
    happens here, too.
    """
    setup: Any = getattr(_operators, "setup_compilation_env", None)

    @contextmanager
    def compiling(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with torch.compiler.set_stance("default"), setup(*args, **kwargs) as backend:
            yield backend

    with torch.compiler.set_stance("force_eager"):
        if setup is None:
            yield
            return
        _operators.setup_compilation_env = compiling
        try:
            yield
        finally:
            _operators.setup_compilation_env = setup


@contextmanager
def untouched() -> Iterator[None]:
    """Restore Dynamo's knowledge of sizes, its records of attempts and its counters afterwards.

    So the next compile of the program is as static as it was, and summaries do not show the attempts in between.

    torch before 2.13 cannot keep entries apart: everything compiled is forgotten there (torch.compiler.reset()).
    """
    if not _ISOLATES:
        torch.compiler.reset()
    state = getattr(_pgo, "_CODE_STATE", None)
    if state is not None:
        _pgo._CODE_STATE = copy.deepcopy(state)
    counted = {name: copy.copy(values) for name, values in counters.items()}
    attempts = tuple(getattr(_dynamo_utils, "_compilation_metrics", ()))
    try:
        yield
    finally:
        kept = getattr(_dynamo_utils, "_compilation_metrics", None)
        if kept is not None:
            kept.clear()
            kept.extend(attempts)
        for name in counters.keys() - counted.keys():
            del counters[name]
        for name, values in counted.items():
            counters[name].clear()
            counters[name].update(values)
        if _ISOLATES:
            if hasattr(_pgo, "_CODE_STATE"):
                _pgo._CODE_STATE = state
        else:
            torch.compiler.reset()


@contextmanager
def released() -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Free compiled graphs at the end, although Dynamo keeps what a backend returns until it is reset.

    It yields a function that takes a compiled graph and gives what the backend is to return, which runs the graph
    while this is open.
    """
    held: list[Callable[..., Any]] = []

    def around(compiled: Callable[..., Any]) -> Callable[..., Any]:
        number = len(held)
        held.append(compiled)
        return lambda *inputs: held[number](*inputs)

    try:
        yield around
    finally:
        held.clear()
