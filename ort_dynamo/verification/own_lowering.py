"""Writes a program's own lowering into another program: by its source, or by an import."""

from __future__ import annotations

import ast
import inspect
import math
import sys
import sysconfig
import textwrap
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from ort_dynamo.lowering.registry import find_lowering, is_from_outside
from ort_dynamo.program.read_objects import global_names

__all__ = ["UnwritableError", "registration", "spelled_constant"]


class UnwritableError(Exception):
    """A function that another program can neither define nor import, with the reason."""


def registration(operator: Any) -> str:
    """Return the lines that register a program's lowering of an operator; "" if it has none.

    Raises:
        UnwritableError: it can be neither written nor imported.
    """
    if not is_from_outside(operator):
        return ""
    written = _Written()
    name = written.function(find_lowering(operator), "lowering")
    register = f"ort_dynamo.register_lowering(torch.ops.{operator}, replace=True)({name})"
    return "\n".join(["import ort_dynamo", *written.lines.values(), register]) + "\n\n"


class _Written:
    """Definitions and imports of a program.

    Attributes:
        lines: name -> the lines that define it, in order.
    """

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        self._values: dict[str, Any] = {}

    def function(self, function: Any, called: str) -> str:
        """Add a function with all that it reads, and return its name.

        Args:
            function: any callable.
            called: the name of one that has none, a lambda.

        Raises:
            UnwritableError: it can be neither written nor imported.
        """
        name = getattr(function, "__name__", called)
        name = name if name.isidentifier() else called
        if self._is_new(name, function):
            lines, values = dict(self.lines), dict(self._values)
            try:
                self._define(function, name)
            except UnwritableError:
                imported = _imported(function)
                if imported is None:
                    raise
                self.lines, self._values = {**lines, name: imported}, {**values, name: function}
        return name

    def _is_new(self, name: str, value: Any) -> bool:
        """Check whether a name is not defined yet; take it."""
        if name in _RESERVED and value is not _RESERVED[name]:
            raise UnwritableError(
                f"the lowering reads {name}, which the program that repeats the fault calls otherwise"
            )
        if name in self._values:
            if self._values[name] is not value:
                raise UnwritableError(f"the lowering reads two values called {name}")
            return False
        self._values[name] = value
        return True

    def _define(self, function: Any, name: str) -> None:
        if not isinstance(function, FunctionType):
            raise UnwritableError(f"the lowering is a {type(function).__name__}, and no function")
        defined = _source(function)
        known = function.__globals__
        names = dict.fromkeys([*global_names(function.__code__), *_read_by_defaults(defined)])
        read = {one: known[one] for one in names if one in known}
        for one, value in {**read, **inspect.getclosurevars(function).nonlocals}.items():
            if isinstance(value, FunctionType):
                found = self.function(value, one)
                if found != one and self._is_new(one, value):
                    self.lines[one] = f"{one} = {found}"
            elif self._is_new(one, value):
                self.lines[one] = _spelled(one, value, defined)
        source = ast.unparse(defined)
        self.lines[name] = f"{name} = {source}" if isinstance(defined, ast.Lambda) else f"\n\n{source}\n\n"


_RESERVED = {
    "sys": sys,
    "Path": Path,
    "torch": torch,
    "ort_dynamo": sys.modules["ort_dynamo"],
    **dict.fromkeys(("run_alone", "x", "alone"), object()),
}
"""Names of the program that repeats a fault, and their values where a lowering may have them."""


def _read_by_defaults(defined: ast.FunctionDef | ast.Lambda) -> list[str]:
    defaults = [*defined.args.defaults, *filter(None, defined.args.kw_defaults)]
    return [node.id for one in defaults for node in ast.walk(one) if isinstance(node, ast.Name)]


def _spelled(name: str, value: Any, reader: ast.FunctionDef | ast.Lambda) -> str:
    """Return the lines that give a name to a module or a constant, as the function that reads it needs them."""
    if isinstance(value, ModuleType):
        root = _root(value)
        path = f"sys.path.append({str(root)!r})\n" if root is not None and not _is_installed(root) else ""
        inside = "".join(f"import {one}\n" for one in _read_submodules(value, reader))
        return f"{path}{inside}import {value.__name__} as {name}"
    if isinstance(value, (bool, int, float, str, torch.dtype)) or value is None:
        return f"{name} = {spelled_constant(value)}"
    raise UnwritableError(f"the lowering reads {name}, a {type(value).__name__}")


def _read_submodules(package: ModuleType, reader: ast.FunctionDef | ast.Lambda) -> list[str]:
    """List the modules of a package that a function may read as its attributes; to import the package is not enough."""
    read = dict.fromkeys(node.attr for node in ast.walk(reader) if isinstance(node, ast.Attribute))
    return [name for one in read if (name := f"{package.__name__}.{one}") in sys.modules]


def spelled_constant(value: Any) -> str:
    """Return Python's expression for a value, also for floats that are no literals."""
    is_literal = not isinstance(value, float) or math.isfinite(value)
    return repr(value) if is_literal else f"float({str(value)!r})"


def _source(function: FunctionType) -> ast.FunctionDef | ast.Lambda:
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError) as error:  # a program without a file, or a lambda that is a part of a line
        raise UnwritableError(f"the source of {function.__qualname__} is not known") from error
    found = [node for node in ast.walk(source) if isinstance(node, (ast.FunctionDef, ast.Lambda))][:2]
    if not found or (isinstance(found[0], ast.Lambda) and len(found) > 1):
        raise UnwritableError(f"the source of {function.__qualname__} is not known")
    if isinstance(defined := found[0], ast.FunctionDef):
        defined.decorator_list, defined.returns = [], None
        for argument in ast.walk(defined.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
    return defined


def _imported(function: Any) -> str | None:
    """Return the lines that import a function; None where it is in no module that can be imported."""
    name, module = getattr(function, "__name__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not function:
        return None
    root = _root(module)
    if root is None:
        return None
    return f"sys.path.append({str(root)!r})\nfrom {module.__name__} import {name}\n"


def _root(module: ModuleType) -> Path | None:
    """Return the folder by which a module is imported; None where its name does not fit its file."""
    parts = module.__name__.split(".")
    for spelled in _places(module):
        if list(spelled.parts[-len(parts) :]) == parts:
            return Path(*spelled.parts[: -len(parts)])
    return None


def _places(module: ModuleType) -> list[Path]:
    """List the paths that may end with a module's name: a file's or its folder's, or those of a package without a file.

    A built-in module, such as itertools, has none.
    """
    if file := getattr(module, "__file__", None):
        return [Path(file).with_suffix(""), Path(file).parent]
    return [Path(folder) for folder in getattr(module, "__path__", ())]


def _is_installed(root: Path) -> bool:
    return any(root == Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
