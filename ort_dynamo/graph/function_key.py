"""The behaviour of a Python function as text, for keys that must change when the function does.

The text has bytecode, constants, defaults, attributes, captured values and every global that the code reads; functions
among these are included in the same way. Names and line numbers of the source are left out. Functions and modules of
packages whose version is in the key are included by name.
"""

from __future__ import annotations

import dis
import enum
import hashlib
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from ort_dynamo.torch_internals.kernels.operators import OpOverload, OpOverloadPacket

__all__ = ["NotKeyableError", "spell_function"]

_PLAIN = (bool, int, float, complex, str, bytes, tuple, torch.Size, list, set, frozenset, dict, np.ndarray, partial)
_VERSIONED = frozenset({"numpy", "onnx", "onnx_ir", "onnxscript", "ort_dynamo", "sympy", "torch"})


class NotKeyableError(Exception):
    """A value whose content cannot be spelled."""


def spell_function(function: Callable[..., Any]) -> str:
    """Return the content of `function` as text, equal in every process that has the same Python and packages.

    Raises:
        NotKeyableError: the function reads a value that has no text: an object of a user's class, a tensor, or a module
            that belongs neither to Python nor to a package with a known version.
    """
    return f"{sys.implementation.cache_tag} numpy={np.__version__} {_Speller().spell(function)}"


class _Speller:
    def __init__(self) -> None:
        self._functions: dict[types.FunctionType, int] = {}  # in order of first sight; ends recursion

    def spell(self, value: Any) -> str:
        match value:
            case enum.Enum() if _is_versioned(type(value).__module__):
                return f"{_qualified(type(value))}.{value.name}"
            case np.generic() if not value.dtype.hasobject:
                return f"scalar({value.dtype.str},{value.tobytes().hex()})"
            case _ if isinstance(value, _PLAIN) and type(value) not in _PLAIN:
                pass  # a class derived from one of them can hold more, and do anything
            case float():
                return f"float({value.hex()})"
            case None | bool() | int() | str() | bytes() | complex() | types.EllipsisType():
                return f"{type(value).__name__}({value!r})"
            case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                return str(value)
            case OpOverload() | OpOverloadPacket():
                return f"operator({value})"
            case tuple() | list():
                return f"{type(value).__name__}({','.join(map(self.spell, value))})"
            case frozenset() | set():
                return f"set({','.join(sorted(map(self.spell, value)))})"
            case dict():
                return "dict(" + ",".join(f"{self.spell(k)}:{self.spell(v)}" for k, v in value.items()) + ")"
            case np.ndarray() if not value.dtype.hasobject:
                return f"array({value.dtype.str},{value.shape},{hashlib.sha256(value.tobytes()).hexdigest()})"
            case partial():
                return f"partial({self.spell(value.func)},{self.spell(value.args)},{self.spell(value.keywords)})"
            case types.FunctionType() if not _is_named(value):
                return self._spell_code_of(value)
            case types.ModuleType() if _is_versioned(value.__name__):
                return f"module({value.__name__})"
            case type() | types.FunctionType() | types.BuiltinFunctionType() if _is_named(value):
                return _qualified(value)
        raise NotKeyableError(f"{type(value).__name__} {value!r:.80}")

    def _spell_code_of(self, function: types.FunctionType) -> str:
        if function in self._functions:
            return f"function({self._functions[function]})"
        self._functions[function] = len(self._functions)
        parts = [
            f"{function.__module__}.{function.__qualname__}",
            self._spell_code(function.__code__),
            self.spell(function.__defaults__),
            self.spell(function.__kwdefaults__),
            self.spell(function.__dict__),
            self.spell([cell.cell_contents for cell in function.__closure__ or ()]),
            *(f"{name}={self._spell_global(function, name)}" for name in _globals_read(function.__code__)),
        ]
        return f"function({';'.join(parts)})"

    def _spell_code(self, code: types.CodeType) -> str:
        constants = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
        nested = [self._spell_code(c) for c in code.co_consts if isinstance(c, types.CodeType)]
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        shape = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        return f"code({code.co_code.hex()},{self.spell(constants)},{nested},{names},{shape},{code.co_exceptiontable!r})"

    def _spell_global(self, function: types.FunctionType, name: str) -> str:
        if name in function.__globals__:
            return self.spell(function.__globals__[name])
        return f"builtin({name})"


def _globals_read(code: types.CodeType) -> list[str]:
    """Names that the code, or code nested in it, reads from its module; NotKeyableError for imports of the user's."""
    return sorted(set(_walk_globals(code)))


def _walk_globals(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
        elif instruction.opname == "IMPORT_NAME" and not _is_versioned(instruction.argval):
            raise NotKeyableError(f"an import of {instruction.argval}")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _walk_globals(constant)


def _is_named(value: Any) -> bool:
    """Check whether the module and name of `value` identify it: it is at the top of a module with a known version."""
    module = getattr(value, "__module__", None)
    return module is not None and _is_versioned(module) and "<" not in value.__qualname__


def _is_versioned(module: str) -> bool:
    top = module.partition(".")[0]
    return top in _VERSIONED or top in sys.stdlib_module_names  # with builtins, and without __main__


def _qualified(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
