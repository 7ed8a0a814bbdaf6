"""Writes compiled graphs where the user asked for them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import onnx

from ort_dynamo.options.groups import DumpOptions

__all__ = ["dump_model"]


def dump_model(model: bytes, options: DumpOptions, name: str) -> Path | None:
    """Write a serialised model to `options.save_onnx` as `<name>.onnx`, whole or not at all.

    Returns:
        The file's path, or None if nothing was asked for.

    Raises:
        OSError: the folder cannot be made or written.
        onnx.checker.ValidationError: with `options.verify`, the model is not valid ONNX.
    """
    if options.verify:
        onnx.checker.check_model(model)
    if options.save_onnx is None:
        return None
    folder = Path(options.save_onnx)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.onnx"
    # A reader, or a process killed half-way, must never see half a file.
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(model)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
