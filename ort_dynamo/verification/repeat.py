"""Writes small programs that repeat a fault alone, with their tensors in a file beside them."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import onnx_ir as ir
import torch

from ort_dynamo.lowering.registry import find_lowering, is_from_outside
from ort_dynamo.saving.files import write_bytes, write_model
from ort_dynamo.verification.models import LoweredIsland

__all__ = ["FOLDER", "write_models", "write_operator", "written"]

FOLDER = "ort_dynamo_faults"
"""The folder for programs that repeat a fault, where the program names no other."""

_OPERATOR = '''"""Repeat a fault of ort_train: exits 1 while {operator} is wrong, and 0 after.

The operator comes from: {line}
"""

import sys
from pathlib import Path

import torch

{registration}from ort_dynamo.verification.alone import run_alone

x = torch.load(Path(__file__).with_suffix(".pt"))
alone = run_alone(
    torch.ops.{operator},
    {args},
    {kwargs},
    read={read},
)
print("\\n".join(alone.nodes))
print(f"differs from torch: {{alone.problem}} ({{alone.culprit}})" if alone.problem else "equal to torch")
sys.exit(1 if alone.problem else 0)
'''

_MODELS = '''"""Repeat a fault of ort_train: exits 1 while two models that should be equal differ, and 0 after.

The second model is made of the first by: {cause}
"""

import sys
from pathlib import Path

from ort_dynamo.verification.two_models import compare_models

here = Path(__file__)
problem = compare_models(here.with_suffix(".onnx"), here.with_suffix(".pt"), {after})
print(f"the models differ: {{problem}}" if problem else "the models agree")
sys.exit(1 if problem else 0)
'''


def written(write: Callable[..., str], *given: Any) -> tuple[str, str]:
    """Write a program by one of the functions below; give its path, or "" and the reason why there is none.

    The fault is known by then, and a full disk or a wrong folder is no reason to lose it.
    """
    try:
        return write(*given), ""
    except OSError as error:
        return "", f" (the program that repeats it could not be written: {error})"


def write_operator(
    folder: Path,
    name: str,
    operator: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    read: Sequence[int] | None,
    line: str,
) -> str:
    """Write a program that runs one operator alone, as `run_alone` does, and return its path.

    None is written, and the path is empty, where the program's own lowering can be neither written nor imported.

    Raises:
        OSError: the folder cannot be written.
    """
    tensors: list[torch.Tensor] = []
    spelled_args, spelled_kwargs = _spelled(tuple(args), tensors), _spelled(dict(kwargs), tensors)
    registration = _registration(operator)
    if registration is None:
        return ""
    text = _OPERATOR.format(
        operator=operator,
        line=_in_docstring(line),
        registration=registration,
        args=spelled_args,
        kwargs=spelled_kwargs,
        read=read,
    )
    return _write(folder, name, text, tensors)


def write_models(
    folder: Path,
    name: str,
    right: LoweredIsland,
    wrong: ir.Model | None,
    inputs: Sequence[Any],
    cause: str,
) -> str:
    """Write a program that runs a model before and after a change, and return its path.

    Args:
        folder: where to.
        name: of the files.
        right: the model before.
        wrong: the model after; None if ONNX Runtime's optimizers make it.
        inputs: of the island.
        cause: the change, in words.

    Raises:
        OSError: the folder cannot be written.
    """
    name = _file_name(name)
    write_model(right.model, folder / f"{name}.onnx")
    after = '"optimized"'
    if wrong is not None:
        write_model(wrong, folder / f"{name}-after.onnx")
        after = 'here.with_name(here.stem + "-after.onnx")'
    fed = [_as_fed(one, way.order) for one, way in zip(inputs, right.inputs, strict=True) if way.is_read]
    text = _MODELS.format(cause=_in_docstring(cause), after=after)
    return _write(folder, name, text, fed)


def _as_fed(value: Any, order: tuple[int, ...]) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return (tensor.permute(order) if order else tensor).contiguous()


def _write(folder: Path, name: str, text: str, tensors: Sequence[torch.Tensor]) -> str:
    path = folder / f"{_file_name(name)}.py"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save([one.detach().cpu() for one in tensors], path.with_suffix(".pt"))
    write_bytes(text.encode(), path)
    return str(path)


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def _in_docstring(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', "'")


# -- arguments as Python ---------------------------------------------------------------------------------------------


def _spelled(value: Any, tensors: list[torch.Tensor]) -> str:
    """Spell an argument; its tensors go into a list, and are read from it as x[0], x[1] and so on."""
    match value:
        case torch.Tensor():
            tensors.append(value)
            on = "" if value.device.type == "cpu" else f".to({str(value.device)!r})"
            return f"x[{len(tensors) - 1}]{on}"
        case tuple():
            return f"({''.join(f'{_spelled(one, tensors)}, ' for one in value).strip()})"
        case list():
            return f"[{', '.join(_spelled(one, tensors) for one in value)}]"
        case dict():
            return f"{{{', '.join(f'{key!r}: {_spelled(one, tensors)}' for key, one in value.items())}}}"
        case torch.device():
            return f"torch.device({str(value)!r})"
        case float():
            return f"float({str(value)!r})" if value != value or value in (float("inf"), -float("inf")) else repr(value)
    return repr(value)


# -- a program's own lowerings ---------------------------------------------------------------------------------------


def _registration(operator: Any) -> str | None:
    """Return the lines that register a program's lowering; None where it cannot be written or imported."""
    if not is_from_outside(operator):
        return ""
    function = find_lowering(operator)
    lines = _defined(function) or _imported(function)
    if lines is None:
        return None
    *before, name = lines
    register = f"ort_dynamo.register_lowering(torch.ops.{operator}, replace=True)({name})"
    return "\n".join(["import ort_dynamo", *before, register]) + "\n\n"


def _defined(function: Any) -> list[str] | None:
    """Return the lines that define a function, and its name; None where it reads more than modules and constants."""
    if not isinstance(function, FunctionType):
        return None
    used = inspect.getclosurevars(function)
    lines = [_constant(name, value) for name, value in {**used.globals, **used.nonlocals}.items()]
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # a program without a file, or a lambda that is a part of a line
        return None
    found = [node for node in ast.walk(source) if isinstance(node, (ast.FunctionDef, ast.Lambda))][:2]
    if None in lines or not found or (isinstance(found[0], ast.Lambda) and len(found) > 1):
        return None
    if isinstance(defined := found[0], ast.Lambda):
        return [*map(str, lines), f"lowering = {ast.unparse(defined)}", "lowering"]
    defined.decorator_list, defined.returns = [], None
    for argument in ast.walk(defined.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return [*map(str, lines), "", "", ast.unparse(defined), "", "", defined.name]


def _constant(name: str, value: Any) -> str | None:
    if isinstance(value, ModuleType):
        root = _root(value)
        path = f"sys.path.append({str(root)!r})\n" if root is not None and not _is_installed(root) else ""
        return f"{path}import {value.__name__} as {name}"
    plain = isinstance(value, (bool, int, float, str, torch.dtype)) or value is None
    return f"{name} = {_spelled(value, [])}" if plain else None


def _imported(function: Any) -> list[str] | None:
    """Return the lines that import a function, and its name; None where it is in no module that can be imported."""
    name, module = getattr(function, "__name__", ""), sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not function:
        return None
    root = _root(module)
    if root is None:
        return None
    return [f"sys.path.append({str(root)!r})", f"from {module.__name__} import {name}", "", name]


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
