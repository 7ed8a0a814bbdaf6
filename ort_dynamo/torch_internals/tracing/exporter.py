"""Trace a function of onnxscript's torch_lib by parts of torch's own exporter to ONNX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import onnx_ir as ir

from ort_dynamo.torch_internals.lookup import private

__all__ = ["Exporter", "ExporterMissingError", "find_exporter"]


class ExporterMissingError(Exception):
    """The installed torch or onnxscript lacks a part that tracing torch_lib's functions needs."""


@dataclass(frozen=True)
class Exporter:
    """The exporter's parts.

    Attributes:
        opset: makes the opset of a version.
        recorder: makes, of an opset, the recorder of the nodes that a function calls.
        recording: a context in which calls of ONNX operators go to a recorder.
        stand_in: makes, of an opset and a value, the value that a function is given for it.
        errors: exceptions that a function raises if it does not take its arguments.
        functions: torch_lib's functions for an overload's full name, "aten::relu", the best first.
    """

    opset: Callable[[int], Any]
    recorder: Callable[[Any], Any]
    recording: Callable[[Any], AbstractContextManager[Any]]
    stand_in: Callable[[Any, ir.Value], ir.Value]
    errors: tuple[type[Exception], ...]
    functions: Callable[[str], list[Any]]


def find_exporter(opset_version: int) -> Exporter:
    """Return the exporter's parts, tried once a process.

    torch 2.11 to 2.15 have them in torch.onnx._internal.exporter, onnxscript 0.7 in its evaluator and torch_lib.

    Raises:
        ExporterMissingError: one is missing, or takes other arguments; torch_lib is not to be asked then.
    """
    found = _try(opset_version)
    if isinstance(found, str):
        raise ExporterMissingError(found)
    return found


@functools.cache
def _try(opset_version: int) -> Exporter | str:
    """Return the parts, or their fault."""
    try:
        found = _find()
        opset = found.opset(opset_version)
        found.stand_in(opset, ir.Value(name="x"))
        found.functions("aten::relu")
        with found.recording(found.recorder(opset)):
            pass
    except (AttributeError, ImportError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return found


def _find() -> Exporter:
    onnxscript = import_module("onnxscript")  # 20 MB, so only when needed
    exporter = "torch.onnx._internal.exporter"
    recorder = private(f"{exporter}._building:OpRecorder")
    tensor = private(f"{exporter}._tensors:SymbolicTensor")
    if recorder is None or tensor is None:
        raise ImportError("torch's ONNX exporter has no recorder of operators")
    errors: list[type[Exception]] = [TypeError, ValueError]
    for error in ("torch.onnx.errors:OnnxExporterError", f"{exporter}._errors:GraphConstructionError"):
        errors += filter(None, [private(error)])
    return Exporter(
        opset=partial(onnxscript.values.Opset, ""),
        recorder=lambda opset: recorder(opset, {}),
        recording=onnxscript.evaluator.default_as,
        stand_in=lambda opset, value: tensor(opset, value.name, value.shape, value.type),
        errors=tuple(errors),
        functions=_torchlib_functions,
    )


def _torchlib_functions(name: str) -> list[Any]:
    import_module("onnxscript.function_libs.torch_lib.ops")  # fills the registry; a second, so only when needed
    registry = import_module("onnxscript.function_libs.torch_lib.registration").default_registry
    return list(registry[name].overloads) if name in registry else []
