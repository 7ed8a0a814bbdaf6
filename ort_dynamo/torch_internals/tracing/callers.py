"""Remember which module and which line of the program called the code that Dynamo tries to compile.

Dynamo's own records name the function alone. That is `inner` in a file of torch's for every module of torch.nn, and
nothing at all where the recompile limit was reached. Dynamo lets a program add a text to the record of each attempt:
ours is a key under which the caller is found here.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from ort_dynamo.torch_internals.lookup import private

__all__ = [
    "Caller",
    "backend_module",
    "caller_of",
    "class_name",
    "module_number",
    "outside_torch",
    "resumed_at",
    "uncompiled",
]

_LIMIT = 1024  # as many as the records of attempts that are kept
_INSIDE = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[2]) + os.sep)
_INSTALLED = (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")), "<frozen ")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")
_OWN_REFERENCES = 3
"""References to a copy of a frame's variables: those of the frame, of the function that reads, and of the count."""
_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl")

_register = private("torch._dynamo.utils:register_hook_for_recompile_user_context")
_metrics_context = private("torch._dynamo.utils:get_metrics_context")
_innermost_backend = private("torch._dynamo.eval_frame:innermost_backend")


@dataclass(frozen=True)
class Caller:
    """The caller of a function that Dynamo tried to compile, and the function.

    Attributes:
        module: class of the innermost module that was being called; "" outside of modules.
        around: class of the module whose method made the call; "" where none did.
        where: "file:line" of the program that made the call; "" if it is not known.
        function: name of the function that Dynamo was given; "" if it is not known.
        begins: file and first line of that function.
        backend: the Python module of the backend's function; "" if it is not known.
        fullgraph: True if torch.compile was asked for one graph, and raises where it cannot give one.
        number: number of the innermost module that was being called, or else of the one whose method made the call, by
            which it is told from others of its class; None where there is none.
    """

    module: str
    around: str
    where: str
    function: str
    begins: tuple[str, int]
    backend: str
    fullgraph: bool = False
    number: int | None = None


_callers: OrderedDict[str, Caller] = OrderedDict()
_numbers = count()
_modules: dict[int, tuple[weakref.ref[nn.Module], int]] = {}


def caller_of(contexts: Iterable[str] | None) -> Caller | None:
    """Return the caller of an attempt, by the texts that its record has; None if there is none, or if it is too old."""
    return next((_callers[text] for text in contexts or () if text in _callers), None)


def uncompiled(model: Any) -> Any:
    """Return the module in a result of torch.compile(module); return anything else unchanged."""
    return getattr(model, "_orig_mod", model)


def resumed_at(function: str) -> tuple[str, int] | None:
    """Return the function and line that a function of this name continues after a graph break, or None."""
    found = _RESUMED.fullmatch(function)
    return (found[1], int(found[2])) if found else None


def outside_torch(file: str) -> bool:
    """Check whether a file is neither torch's nor ours."""
    return not file.startswith(_INSIDE)


def module_number(module: nn.Module) -> int:
    """Return a number that no other module of this process has; a compiled one has that of the module in it."""
    inner = uncompiled(module)
    at = id(inner)
    known = _modules.get(at)
    if known is None or known[0]() is not inner:

        def forget(reference: weakref.ref[nn.Module]) -> None:
            if at in _modules and _modules[at][0] is reference:
                del _modules[at]

        known = _modules[at] = (weakref.ref(inner, forget), next(_numbers))
    return known[1]


def class_name(module: object) -> str:
    """Return the class of a module, or of the module in a compiled one, without the function that defines it."""
    return type(uncompiled(module)).__qualname__.rpartition("<locals>.")[2]


def _remember() -> str:
    """Keep the caller of the attempt that begins; Dynamo calls this and writes the result into its record."""
    around = _take_back()
    if around is not None:
        return around
    key = f"ort_dynamo:{next(_numbers)}"
    _callers[key] = _caller(sys._getframe(1))
    while len(_callers) > _LIMIT:
        _callers.popitem(last=False)
    return key


def _take_back() -> str | None:
    """Take our text out of the record of an attempt that this one is nested in, and return it, to be written again.

    Nested attempts share the record of the outermost. Dynamo raises an error where it has a text already, so that a
    backend which calls compiled code while it compiles would fail.
    """
    record = getattr(_metrics_context(), "_metrics", None) if _metrics_context is not None else None
    texts = record.pop("recompile_user_contexts", None) if record else None
    return next((text for text in texts or () if text in _callers), None)


def _caller(innermost: FrameType | None) -> Caller:
    outside, own = "", ""
    module: nn.Module | None = None
    around: nn.Module | None = None
    code: CodeType | None = None
    compiler: Any = None
    fullgraph = False
    for frame in _outwards(innermost):
        file = frame.f_code.co_filename
        if not outside_torch(file):
            if outside:
                continue
            if code is None and frame.f_code.co_name == "_compile":
                code, compiler, one_graph = _variables(frame, ("code", "compiler_fn", "one_graph"))
                fullgraph = bool(one_graph)
            elif module is None and frame.f_code.co_name in _CALLS:
                module = _own_module(frame)
            continue
        where = f"{file}:{frame.f_lineno}"
        resumed = resumed_at(frame.f_code.co_name) is not None
        if not outside or (around is None and own):
            around = _own_module(frame)
        outside = outside or where
        if not file.startswith(_INSTALLED):
            own = own or where
        if own and (around is not None or not resumed):  # a resumed function may have lost its module
            break
    called = module if module is not None else around
    return Caller(
        module="" if module is None else class_name(module),
        around="" if around is None else class_name(around),
        where=own or outside,
        function=code.co_name if code else "",
        begins=(code.co_filename, code.co_firstlineno) if code else ("", 0),
        backend=backend_module(compiler),
        fullgraph=fullgraph,
        number=None if called is None else module_number(called),
    )


def _own_module(frame: FrameType) -> nn.Module | None:
    first = frame.f_code.co_varnames[: frame.f_code.co_argcount][:1]
    found = _variables(frame, ("self", *first))
    called = next((one for one in found if one is not None), None)
    return called if isinstance(called, nn.Module) else None


def _variables(frame: FrameType, names: Sequence[str]) -> list[Any]:
    """Return variables of a frame, or None for those that it lacks.

    Before Python 3.13 a read of `f_locals` leaves a copy of all variables in a function's frame. It would keep a model
    that the program deletes until the function returns. The copy is emptied, unless the program or a debugger has it.
    """
    variables = frame.f_locals
    found = [variables.get(name) for name in names]
    is_copy = (
        type(variables) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    )  # else it is the namespace itself
    if is_copy and sys.getrefcount(variables) <= _OWN_REFERENCES and sys.gettrace() is None:
        variables.clear()
    return found


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def backend_module(compiler: Any) -> str:
    """Return the Python module of the backend's function in one of Dynamo's callbacks; "" if it is not known."""
    if compiler is None:
        return ""
    inner = _innermost_backend(compiler) if _innermost_backend else compiler
    return getattr(getattr(inner, "compiler_fn", inner), "__module__", None) or ""


if _register is not None:
    _register(_remember)
