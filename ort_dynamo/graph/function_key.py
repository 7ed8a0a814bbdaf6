"""The behaviour of a Python function as text, for keys that must change when the function does.

The text has bytecode, constants, defaults, attributes, captured values and every global that the code reads; functions
among these are included in the same way. Names and line numbers of the source are left out. Functions and modules of
packages whose version is in the key are included by name. So are those parts of Python whose functions depend on their
arguments alone. A function that reads the environment, a file, the clock or the table of modules has no text.
"""

from __future__ import annotations

import builtins
import dis
import enum
import hashlib
import importlib.util
import itertools
import operator
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from ort_dynamo.torch_internals.kernels.operators import OpOverload, OpOverloadPacket

__all__ = ["NotKeyableError", "spell_array", "spell_function"]

_PLAIN = (bool, int, float, complex, str, bytes, tuple, torch.Size, list, set, frozenset, dict, np.ndarray, partial)
_VERSIONED = frozenset({"numpy", "onnx", "onnx_ir", "onnxscript", "ort_dynamo", "sympy", "torch"})
_STATELESS = frozenset({
    *("__future__", "abc", "bisect", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum"),
    *("fractions", "functools", "hashlib", "heapq", "itertools", "json", "logging", "math", "numbers"),
    *("operator", "re", "statistics", "string", "struct", "textwrap", "types", "typing", "warnings"),
})  # fmt: skip
"""Python's modules whose functions depend on their arguments alone, but for output."""
_IMPURE_BUILTINS = frozenset({
    *("__import__", "breakpoint", "compile", "dir", "eval", "exec", "globals", "hash", "id", "input", "locals", "open"),
    "vars",
})  # fmt: skip
"""Built-in functions whose results depend on more than their arguments."""
_IMPURE_FUNCTIONS = frozenset({
    *("fromfile", "from_file", "genfromtxt", "load", "load_model", "loadtxt", "memmap", "open_memmap"),
    *("load_external_data_for_model", "load_state_dict_from_url"),
    *("rand", "randint", "randn", "random", "get_default_dtype", "get_num_threads"),
})  # fmt: skip
"""Functions of the versioned packages that read files or settings, or that draw random numbers."""
_IMPURE = _IMPURE_BUILTINS | _IMPURE_FUNCTIONS
_PYTHON = frozenset({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)})
_FOLDERS = _PYTHON | {os.path.join(folder, "lib-dynload") for folder in _PYTHON}
"""The folders of Python's own modules."""


class NotKeyableError(Exception):
    """A value whose content cannot be spelled."""


def spell_function(function: Callable[..., Any]) -> str:
    """Return the content of `function` as text, equal in every process that has the same Python and packages.

    Raises:
        NotKeyableError: the function reads a value that has no text: an object of a user's class, a tensor, or a module
            that belongs neither to Python nor to a package with a known version.
    """
    return f"{sys.implementation.cache_tag} numpy={np.__version__} {_Speller().spell(function)}"


def spell_array(array: np.ndarray[Any, Any]) -> str:
    """Return dtype, shape and content of an array without Python objects as text."""
    return f"array({array.dtype.str},{array.shape},{hashlib.sha256(array.tobytes()).hexdigest()})"


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
                return spell_array(value)
            case partial():
                return f"partial({self.spell(value.func)},{self.spell(value.args)},{self.spell(value.keywords)})"
            case types.FunctionType() if not _is_named(value):
                return self._spell_code_of(value)
            case types.ModuleType() if _is_versioned(value.__name__) and _is_itself(value):
                return f"module({value.__name__})"
            case types.BuiltinFunctionType() | types.FunctionType() if _is_named(value) and value.__name__ in _IMPURE:
                pass
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
            *(self._spell_global(function, *read) for read in _globals_read(function.__code__)),
        ]
        return f"function({';'.join(parts)})"

    def _spell_code(self, code: types.CodeType) -> str:
        constants = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
        nested = [self._spell_code(c) for c in code.co_consts if isinstance(c, types.CodeType)]
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        shape = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        return f"code({code.co_code.hex()},{self.spell(constants)},{nested},{names},{shape},{code.co_exceptiontable!r})"

    def _spell_global(self, function: types.FunctionType, name: str, attribute: str) -> str:
        if name not in function.__globals__:
            if name in _IMPURE_BUILTINS:
                raise NotKeyableError(f"a call of {name}")
            return f"{name}=builtin({name})"
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            return self._spell_module(name, value, attribute)
        return f"{name}={self.spell(value)}"

    def _spell_module(self, name: str, module: types.ModuleType, attribute: str) -> str:
        """Return a module of which an attribute is read; of Python's other modules, the attribute if it is a number."""
        if attribute in (_IMPURE_BUILTINS if module is builtins else _IMPURE_FUNCTIONS):
            raise NotKeyableError(f"a call of {name}.{attribute}")
        if not _is_versioned(module.__name__) and _is_standard(module.__name__):
            found = getattr(module, attribute, module)
            if isinstance(found, tuple):  # sys.version_info is one with names
                found = tuple(found)
            if isinstance(found, (bool, int, float, str, tuple)):
                return f"{name}.{attribute}={self.spell(found)}"
        return f"{name}={self.spell(module)}"


def _globals_read(code: types.CodeType) -> list[tuple[str, str]]:
    """List the names that the code, or code nested in it, reads from its module, each with the attribute read of it.

    The attribute is "" where none is read at once.

    Raises:
        NotKeyableError: the code imports a module of the program's.
    """
    return sorted(set(_walk_globals(code)))


def _walk_globals(code: types.CodeType) -> Iterator[tuple[str, str]]:
    instructions = list(dis.get_instructions(code))
    for instruction, after in itertools.zip_longest(instructions, instructions[1:]):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads = after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
            yield instruction.argval, after.argval if reads else ""
        elif instruction.opname == "IMPORT_NAME" and not _is_versioned(instruction.argval):
            raise NotKeyableError(f"an import of {instruction.argval}")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _walk_globals(constant)


def _is_named(value: Any) -> bool:
    """Check whether the module and name of `value` identify it: it is at the top of a module with a known version.

    A function that `functools.wraps` has made has the name of another one.
    """
    module = getattr(value, "__module__", None)
    if module is None or not _is_versioned(module) or "<" in value.__qualname__:
        return False
    return not isinstance(value, types.FunctionType) or _found(module, value.__qualname__) is value


def _found(module: str, name: str) -> object:
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _is_versioned(module: str) -> bool:
    top = module.partition(".")[0]
    return top in _VERSIONED or (top.removeprefix("_") in _STATELESS and _is_standard(top))


def _is_itself(module: types.ModuleType) -> bool:
    """Check whether a module is the one that is imported by its name; some of torch's namespaces cannot be imported."""
    return module.__name__ not in sys.modules or sys.modules[module.__name__] is module


def _is_standard(module: str) -> bool:
    """Check whether a module is Python's, and no file of the program's with the same name."""
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return False
    loaded = sys.modules.get(top)
    spec = getattr(loaded, "__spec__", None) if loaded is not None else importlib.util.find_spec(top)
    origin = getattr(spec, "origin", None)
    if origin is None or origin in ("built-in", "frozen"):
        return origin is not None
    parent = os.path.dirname(origin)
    return parent in _FOLDERS or (os.path.dirname(parent) in _FOLDERS and os.path.basename(parent) == top)


def _qualified(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
