"""Reading and writing the elements of a TensorProto, which is believed only as far as its data goes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, NodeProto, TensorProto
from torch import Tensor

from ort_dynamo.errors import OnnxModelError
from ort_dynamo.graph.dtypes import ONNX_TO_TORCH
from ort_dynamo.graph.model_limits import subgraphs

__all__ = ["element_type", "read_tensor", "take_in", "with_inner_data", "write_tensor"]

_FIELDS: dict[torch.dtype, tuple[str, Any, torch.dtype]] = {
    torch.float32: ("float_data", np.float32, torch.float32),
    torch.float64: ("double_data", np.float64, torch.float64),
    torch.int64: ("int64_data", np.int64, torch.int64),
}
"""Element type -> the field of its elements outside of raw_data, and the numpy and torch dtypes."""

_BITS = {torch.float16, torch.bfloat16}
"""Kept in int32_data as the bits of 16."""


def element_type(number: int, what: str) -> torch.dtype:
    """Return the dtype of an ONNX element type; OnnxModelError for a type in which torch has no arithmetic."""
    if number not in ONNX_TO_TORCH:
        names = {value: name for name, value in TensorProto.DataType.items()}
        raise OnnxModelError(reason=f"{what} has the element type {names.get(number, number)}, which cannot be trained")
    return ONNX_TO_TORCH[number]


def read_tensor(proto: TensorProto, base_dir: Path | None = None) -> Tensor:
    """Return a tensor with its own memory, on the CPU.

    Args:
        proto: a tensor with data, or with a place in a file.
        base_dir: the folder of such files; None reads no files.

    Raises:
        OnnxModelError: the element type is not supported, the data does not fit the dimensions, or the file is not
            inside the folder, or too short.
    """
    what = f"the tensor {proto.name!r}"
    dtype = element_type(proto.data_type, what)
    if any(size < 0 for size in proto.dims):
        raise OnnxModelError(reason=f"{what} has negative dimensions: {list(proto.dims)}")
    if proto.HasField("segment"):
        raise OnnxModelError(reason=f"{what} is a segment of a tensor, which is not supported")
    count = math.prod(proto.dims)
    if proto.data_location == TensorProto.EXTERNAL:
        data = _read_file(proto, count * dtype.itemsize, base_dir, what)
        return _of_bytes(data, dtype, proto, count, what)
    if proto.HasField("raw_data"):
        return _of_bytes(proto.raw_data, dtype, proto, count, what)
    name, kind, held = _FIELDS.get(dtype, ("int32_data", np.int32, torch.int32))
    field = getattr(proto, name)
    if len(field) != count:
        raise OnnxModelError(reason=f"{what} has {len(field)} elements in {name}; its dimensions say {count}")
    values = torch.from_numpy(np.array(field, dtype=kind))
    if dtype in _BITS:
        values = torch.from_numpy(np.array(field, dtype=np.int32).astype(np.uint16).view(np.int16)).view(dtype)
    return _shaped(values.to(dtype) if held != dtype and dtype not in _BITS else values, proto, what)


def _of_bytes(data: bytes, dtype: torch.dtype, proto: TensorProto, count: int, what: str) -> Tensor:
    if len(data) != count * dtype.itemsize:
        raise OnnxModelError(
            reason=f"{what} has {len(data)} bytes of data; its dimensions {list(proto.dims)} and its type need "
            f"{count * dtype.itemsize}"
        )
    if not data:
        return _shaped(torch.empty(0, dtype=dtype), proto, what)
    if dtype == torch.bool:
        return _shaped(torch.frombuffer(bytearray(data), dtype=torch.uint8) != 0, proto, what)
    return _shaped(torch.frombuffer(bytearray(data), dtype=dtype), proto, what)


def _shaped(values: Tensor, proto: TensorProto, what: str) -> Tensor:
    try:
        return values.reshape(tuple(proto.dims))
    except (RuntimeError, OverflowError) as error:
        raise OnnxModelError(reason=f"{what} cannot have the dimensions {list(proto.dims)}: {error}") from error


def _read_file(proto: TensorProto, length: int, base_dir: Path | None, what: str) -> bytes:
    entries = {entry.key: entry.value for entry in proto.external_data}
    location = entries.get("location", "")
    if base_dir is None:
        raise OnnxModelError(
            reason=f"{what} has its data in the file {location!r}: give base_dir, the folder of the model, or load it "
            "with onnx.load, which reads such files"
        )
    if not location or os.path.isabs(location) or ".." in Path(location).parts or "\0" in location:
        raise OnnxModelError(
            reason=f"{what} has its data in {location!r}, which is not the name of a file in its folder"
        )
    offset, said = (_whole(entries.get(key), what, key) for key in ("offset", "length"))
    if said is not None and said != length:
        raise OnnxModelError(
            reason=f"{what} has {said} bytes in {location!r}; its dimensions and its type need {length}"
        )
    try:
        folder = base_dir.resolve()
        path = (folder / location).resolve()
        if not path.is_relative_to(folder) or not path.is_file():
            raise OnnxModelError(reason=f"{what} has its data in {location!r}, which is not a file in {folder}")
        start = offset or 0
        if start + length > path.stat().st_size:
            raise OnnxModelError(reason=f"{what} needs {length} bytes at {start} in {location!r}, which is shorter")
        with path.open("rb") as file:
            file.seek(start)
            return file.read(length)
    except OnnxModelError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to one another, in Python 3.11 and 3.12
        raise OnnxModelError(
            reason=f"{what} has its data in {location!r:.200}, which cannot be read: {error}"
        ) from error


def _whole(text: str | None, what: str, key: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise OnnxModelError(reason=f"{what} has the {key} {text!r} in a file")
    return int(text)


def write_tensor(proto: TensorProto, values: Tensor) -> None:
    """Write elements to the field that holds them now, or to raw_data if they are in a file.

    Args:
        proto: a tensor of the same dimensions, which is changed.
        values: the elements, which are cast to the tensor's element type.
    """
    dtype = ONNX_TO_TORCH[proto.data_type]
    found = values.detach().to(device="cpu", dtype=dtype).contiguous()
    name, kind, held = _FIELDS.get(dtype, ("int32_data", np.int32, torch.int32))
    external = proto.data_location == TensorProto.EXTERNAL
    if external:
        proto.ClearField("external_data")
        proto.ClearField("data_location")
    if external or proto.HasField("raw_data"):
        proto.raw_data = found.reshape(-1).view(torch.uint8).numpy().tobytes() if found.numel() else b""
        return
    flat = found.reshape(-1)
    numbers = flat.view(torch.int16).numpy().view(np.uint16) if dtype in _BITS else flat.to(held).numpy()
    proto.ClearField(name)
    getattr(proto, name).extend(numbers.astype(kind).tolist())


def take_in(proto: TensorProto, base_dir: Path | None) -> None:
    """Move the elements of a tensor from a file into it; raises as `read_tensor` does."""
    if proto.data_location == TensorProto.EXTERNAL:
        write_tensor(proto, read_tensor(proto, base_dir))


def with_inner_data(model: ModelProto, base_dir: Path | None) -> ModelProto:
    """Return a model without files for the constants of nodes and of the graphs in nodes; a copy where there are any.

    Initializers of the outermost graph stay in their files.
    """
    if all(tensor.data_location != TensorProto.EXTERNAL for tensor in _inner_tensors(model)):
        return model
    whole = ModelProto()
    whole.CopyFrom(model)
    for tensor in _inner_tensors(whole):
        take_in(tensor, base_dir)
    return whole


def _inner_tensors(model: ModelProto) -> Iterator[TensorProto]:
    waiting: list[NodeProto] = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while waiting:
        node = waiting.pop()
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for graph in subgraphs(node):
            yield from graph.initializer
            waiting += graph.node
