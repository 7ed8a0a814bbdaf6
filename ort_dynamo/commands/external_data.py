"""Reads the external data of a model file, none of which may be outside of the file's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["external_tensors", "read_external_data"]


def read_external_data(model: ir.Model, folder: Path) -> frozenset[Path]:
    """Check the external data of initializers, which stays in its file, and read that of attributes into memory.

    Args:
        model: the model.
        folder: an absolute path; onnx_ir checks that no tensor is in a file outside of it.

    Returns:
        The files.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is outside of the folder, or does not have the tensor.
    """
    import onnx_ir as ir

    files: set[Path] = set()
    for tensor in external_tensors(model):
        tensor.base_dir = folder
        tensor.numpy()  # a memory map: missing data is found here, before anything is written
        files.add(folder / tensor.location)
    for node in _nodes(model):
        for attribute in [*node.attributes.values()]:
            if attribute.is_ref():
                continue
            given = attribute.value if attribute.type == ir.AttributeType.TENSORS else [attribute.value]
            files |= {folder / one.location for one in given if isinstance(one, ir.ExternalTensor)}
            if isinstance(attribute.value, ir.ExternalTensor):
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _in_memory(attribute.value, folder))
            elif attribute.type == ir.AttributeType.TENSORS:
                read = [_in_memory(one, folder) for one in given]
                node.attributes[attribute.name] = ir.AttrTensors(attribute.name, read)
    return frozenset(files)


def external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    """Return the initializers whose data is in a file."""
    import onnx_ir as ir

    constants = (value.const_value for graph in _graphs(model) for value in graph.initializers.values())
    return [tensor for tensor in constants if isinstance(tensor, ir.ExternalTensor)]


def _in_memory(tensor: ir.TensorProtocol, folder: Path) -> ir.TensorProtocol:
    import onnx_ir as ir

    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    tensor.base_dir = folder
    return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    yield model.graph
    yield from model.graph.subgraphs()
    for function in model.functions.values():
        yield from function.subgraphs()


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()
