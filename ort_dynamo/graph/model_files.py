"""Writes models and the description that joins them, each file whole or not at all."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

__all__ = ["write_bytes", "write_json", "write_model"]

_MOST = 2**31 - 1
"""Bytes of the largest protobuf."""

_ROOM = 2**24
"""Bytes left for all that is no tensor, where tensors have to leave the file."""


def write_model(model: ir.Model, path: Path, most: int = _MOST) -> None:
    """Write a model; if one file cannot hold it, its tensors are in a file "<name>.data" beside it.

    Args:
        model: the model to write.
        path: the file; a missing folder is created, and an existing file is replaced.
        most: the maximum bytes of one file.

    Raises:
        OSError: the folder cannot be made or written.
    """
    tensors = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    if tensors + _ROOM < most or tensors == 0:
        _write(path, lambda temporary: temporary.write_bytes(ir.to_proto(model).SerializeToString()))
        return
    data = path.with_name(f"{path.name}.data")
    # The model names its data file, so that one is written under its last name, and before the model appears.
    _write(path, lambda temporary: ir.save(model, temporary, external_data=data.name, size_threshold_bytes=1024))


def write_bytes(content: bytes, path: Path) -> None:
    """Write bytes; raises OSError as `write_model` does."""
    _write(path, lambda temporary: temporary.write_bytes(content))


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write a mapping of JSON's types, indented; raises OSError as `write_model` does."""
    _write(path, lambda temporary: temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n"))


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside `path` and move it there, so that it is never incomplete, even after a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Made by open(), and so with the permissions that the process's umask leaves; tempfile would make it private.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
