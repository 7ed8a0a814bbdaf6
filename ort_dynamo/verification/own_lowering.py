"""Writes a program's own lowering into another program: by its source, or by an import."""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
import textwrap
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from ort_dynamo.lowering.registry import find_lowering, is_from_outside
from ort_dynamo.program.read_objects import global_names

__all__ = ["UnwritableError", "registration"]


class UnwritableError(Exception):
    """A function that another program can neither define nor import, with the reason."""


def registration(operator: Any) -> str:
    """Return the lines that register a program's lowering of an operator; "" if it has none.

    Raises:
        UnwritableError: it can be neither written nor imported.
    """
    if not is_from_outside(operator):
        return ""
    function = find_lowering(operator)
    lines: dict[str, str] = {}
    name = _write(function, lines)
    register = f"ort_dynamo.register_lowering(torch.ops.{operator}, replace=True)({name})"
    return "\n".join(["import ort_dynamo", *lines.values(), register]) + "\n\n"


def _write(function: Any, lines: dict[str, str]) -> str:
    """Add the lines that a function needs, by the names that they define, and return its own name."""
    name = getattr(function, "__name__", "")
    if name in lines:
        return name
    try:
        return _define(function, lines)
    except UnwritableError:
        imported = _imported(function)
        if imported is None:
            raise
        lines[name] = imported
        return name


def _define(function: Any, lines: dict[str, str]) -> str:
    """Add a function's source, after the modules, constants and functions that it reads."""
    if not isinstance(function, FunctionType):
        raise UnwritableError(f"the lowering is a {type(function).__name__}, and no function")
    defined = _source(function)
    name = "lowering" if isinstance(defined, ast.Lambda) else defined.name
    own = dict(lines)
    own[name] = ""  # a function may call itself
    read = {one: function.__globals__[one] for one in global_names(function.__code__) if one in function.__globals__}
    for one, value in {**read, **inspect.getclosurevars(function).nonlocals}.items():
        if own.get(one) is None:
            _add(one, value, own)
    text = (
        f"lowering = {ast.unparse(defined)}" if isinstance(defined, ast.Lambda) else f"\n\n{ast.unparse(defined)}\n\n"
    )
    lines |= {key: value for key, value in own.items() if key != name}
    lines[name] = text
    return name


def _add(name: str, value: Any, lines: dict[str, str]) -> None:
    if isinstance(value, ModuleType):
        root = _root(value)
        path = f"sys.path.append({str(root)!r})\n" if root is not None and not _is_installed(root) else ""
        lines[name] = f"{path}import {value.__name__} as {name}"
    elif isinstance(value, (bool, int, float, str, torch.dtype)) or value is None:
        is_finite = not isinstance(value, float) or value - value == 0
        lines[name] = f"{name} = {value!r}" if is_finite else f"{name} = float({str(value)!r})"
    elif isinstance(value, FunctionType):
        found = _write(value, lines)
        if found != name:
            lines[name] = f"{name} = {found}"
    else:
        raise UnwritableError(f"the lowering reads {name}, a {type(value).__name__}")


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
    file = Path(str(getattr(module, "__file__", None) or ""))
    parts = module.__name__.split(".")
    for spelled in (file.with_suffix(""), file.parent):  # a module, or a package
        if list(spelled.parts[-len(parts) :]) == parts:
            return Path(*spelled.parts[: -len(parts)])
    return None


def _is_installed(root: Path) -> bool:
    return any(root == Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))
