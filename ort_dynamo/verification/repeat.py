"""Writes small programs that repeat a fault alone, with their tensors in a file beside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from ort_dynamo.graph.boundary import fed
from ort_dynamo.graph.model_files import write_bytes, write_model
from ort_dynamo.verification.models import LoweredIsland
from ort_dynamo.verification.own_lowering import UnwritableError, registration, spelled_constant

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
    except (OSError, UnwritableError) as error:
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

    Raises:
        OSError: the folder cannot be written.
        UnwritableError: the program's own lowering can be neither written nor imported.
    """
    tensors: list[torch.Tensor] = []
    spelled_args, spelled_kwargs = _spelled(tuple(args), tensors), _spelled(dict(kwargs), tensors)
    text = _OPERATOR.format(
        operator=operator,
        line=_in_docstring(line),
        registration=registration(operator),
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
    given = [fed(one, way).contiguous() for one, way in zip(inputs, right.inputs, strict=True) if way.is_read]
    text = _MODELS.format(cause=_in_docstring(cause), after=after)
    return _write(folder, name, text, given)


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
    return spelled_constant(value)
