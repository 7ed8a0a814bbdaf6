"""The bytes of a cache entry, a built island: a checksum, a header of JSON, and the ONNX model.

Reading one executes nothing and opens no file: a model that refers to data outside it is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from ort_dynamo.graph.boundary import ValueSpec
from ort_dynamo.graph.build import BuildRecord, BuiltGraph, PassRecord
from ort_dynamo.graph.dtypes import TORCH_TO_ONNX
from ort_dynamo.graph.fused_op import DOMAIN, FusedOp, fused_ops_from_json, fused_ops_to_json
from ort_dynamo.options.groups import SessionSettings

__all__ = ["Entry", "EntryError", "pack", "read_entry", "read_header"]

_MAGIC = b"ORTDYN\x03\n"
_DIGEST = hashlib.sha256().digest_size
_LENGTH = struct.Struct("<Q")
_PREFIX = len(_MAGIC) + _DIGEST + _LENGTH.size

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TORCH_TO_ONNX}


class EntryError(Exception):
    """Bytes are no entry, or a damaged one; the message has the reason."""


def pack(built: BuiltGraph, key: str) -> bytes:
    """Spell a built graph as an entry.

    Args:
        built: its records of passes lose their summaries, since these are of classes of this process.
        key: its cache key. The header holds it, so that a renamed entry is found out.
    """
    header = {
        "key": key,
        "name": built.name,
        "inputs": list(map(_spec_fields, built.inputs)),
        "outputs": list(map(_spec_fields, built.outputs)),
        "optimization": built.session.graph_optimization,
        "dtypes": sorted(dtype.name for dtype in built.dtypes),
        "origins": dict(built.origins),
        "kernels": fused_ops_to_json(built.kernels),
        "values": dict(built.values),
        "nodes": built.record.nodes,
        "passes": [
            [one.name, one.seconds, one.modified, one.before, one.after, one.operators] for one in built.record.passes
        ],
        "seconds": dict(built.record.seconds),
    }
    spelled = json.dumps(header, separators=(",", ":")).encode()
    body = _LENGTH.pack(len(spelled)) + spelled + built.model
    return _MAGIC + hashlib.sha256(body).digest() + body


def read_header(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Check an entry's sum, and give its header and the bytes of its model.

    Raises:
        EntryError: the bytes are no entry, or damaged.
    """
    if len(data) < _PREFIX or not data.startswith(_MAGIC):
        raise EntryError("it is not a cache entry")
    body = memoryview(data)[len(_MAGIC) + _DIGEST :]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : len(_MAGIC) + _DIGEST]:
        raise EntryError("its checksum is wrong")
    (length,) = _LENGTH.unpack_from(body)
    if length > len(body) - _LENGTH.size:
        raise EntryError("its header is cut short")
    try:
        header = json.loads(bytes(body[_LENGTH.size : _LENGTH.size + length]))
    except (ValueError, RecursionError) as error:
        raise EntryError("its header is not JSON") from error
    if not isinstance(header, dict):
        raise EntryError("its header is not a JSON object")
    return header, body[_LENGTH.size + length :]


@dataclass(frozen=True)
class Entry:
    """The contents of a cache entry.

    Attributes:
        name: its name in the process that built it.
        optimization: ONNX Runtime's level of optimization that it is to be opened with.
        model, inputs, outputs, dtypes, origins, record, kernels, values: as in BuiltGraph.
    """

    name: str
    optimization: str
    model: bytes = dataclasses.field(repr=False)
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    dtypes: frozenset[ir.DataType]
    origins: Mapping[str, int]
    record: BuildRecord
    kernels: tuple[FusedOp, ...]
    values: Mapping[str, int]

    def built(self, name: str, session: SessionSettings, *, in_order: bool) -> BuiltGraph:
        """Give the built island, with the settings to open it.

        Args:
            name: its name in errors and files.
            session: how to open it where the entry does not say that it is optimized.
            in_order: whether its nodes run in the model's order.

        Raises:
            EntryError: it is to be optimized otherwise.
        """
        if self.optimization != session.graph_optimization:
            if self.optimization != "disable":
                raise EntryError(f"its optimization level is {self.optimization!r:.80}")
            session = dataclasses.replace(session, graph_optimization="disable")
        return BuiltGraph(
            name=name,
            model=self.model,
            inputs=self.inputs,
            outputs=self.outputs,
            session=session,
            dtypes=self.dtypes,
            in_order=in_order,
            keyable=True,
            origins=self.origins,
            record=self.record,
            kernels=self.kernels,
            values=self.values,
        )


def read_entry(data: bytes, key: str) -> Entry:
    """Read an entry.

    Args:
        data: the entry.
        key: the key by which it was looked up.

    Raises:
        EntryError: the bytes are no entry, damaged, of another key, or have content that no build writes.
    """
    header, model = read_header(data)
    if header.get("key") != key:
        raise EntryError(f"it is the entry of {header.get('key')!r:.80}")
    inputs, outputs = (tuple(map(_read_spec, _items(header, side))) for side in ("inputs", "outputs"))
    content, kernels = bytes(model), _read_kernels(_field(header, "kernels", str))
    _check_model(content, inputs, outputs, kernels)
    return Entry(
        name=_field(header, "name", str),
        optimization=_field(header, "optimization", str),
        model=content,
        inputs=inputs,
        outputs=outputs,
        dtypes=frozenset(map(_read_element_type, _items(header, "dtypes"))),
        origins=_mapping(header, "origins", _natural),
        record=BuildRecord(
            nodes=_natural(header.get("nodes")),
            passes=tuple(map(_read_pass, _items(header, "passes"))),
            seconds=_mapping(header, "seconds", _number),
        ),
        kernels=kernels,
        values=_mapping(header, "values", _natural),
    )


def _spec_fields(spec: ValueSpec) -> list[Any]:
    dtype = str(spec.dtype).removeprefix("torch.")
    return [dtype, list(spec.order), spec.is_number, list(spec.strides), spec.is_read, spec.as_rows]


def _read_spec(fields: Any) -> ValueSpec:
    if not isinstance(fields, list) or len(fields) != 6:
        raise EntryError(f"its calling convention has {fields!r:.80}")
    dtype, order, is_number, strides, is_read, as_rows = fields
    if (
        not isinstance(dtype, str)
        or dtype not in _DTYPES
        or not all(isinstance(one, bool) for one in (is_number, is_read, as_rows))
    ):
        raise EntryError(f"its calling convention has {fields!r:.80}")
    order, strides = tuple(map(_natural, _list(order))), tuple(map(_natural, _list(strides)))
    if sorted(order) != list(range(len(order))):
        raise EntryError(f"{order!r:.80} is not a permutation of dimensions")
    return ValueSpec(_DTYPES[dtype], order, is_number, strides, is_read, as_rows)


def _read_element_type(name: Any) -> ir.DataType:
    if not isinstance(name, str) or name not in ir.DataType.__members__:
        raise EntryError(f"{name!r:.80} is not an element type")
    return ir.DataType[name]


def _read_pass(fields: Any) -> PassRecord:
    match fields:
        case [str(name), seconds, bool(modified), before, after, [*operators]]:
            read, counts = tuple(map(_read_counts, operators)), (_natural(before), _natural(after))
            return PassRecord(name, _number(seconds), modified, before=counts[0], after=counts[1], operators=read)
    raise EntryError(f"it lists an invalid pass: {fields!r:.80}")


def _read_counts(fields: Any) -> tuple[str, int, int]:
    match fields:
        case [str(operator), before, after]:
            return operator, _natural(before), _natural(after)
    raise EntryError(f"it lists invalid counts of a pass: {fields!r:.80}")


# -- the model -------------------------------------------------------------------------------------------------------


def _check_model(
    content: bytes, inputs: Sequence[ValueSpec], outputs: Sequence[ValueSpec], kernels: Sequence[FusedOp]
) -> None:
    """Check that a model has the inputs and outputs of its specs, no external data, and functions for its kernels."""
    try:
        model = onnx.ModelProto.FromString(content)
    except (DecodeError, RecursionError) as error:
        raise EntryError("its model is not a protobuf") from error
    if sorted((one.domain, one.name) for one in model.functions) != sorted((DOMAIN, op.name) for op in kernels):
        raise EntryError("its model's functions and its kernels do not match")
    read = [spec for spec in inputs if spec.is_read]
    for specs, values in ((read, model.graph.input), (outputs, model.graph.output)):
        types = [value.type.tensor_type.elem_type for value in values]
        if types != [TORCH_TO_ONNX[spec.dtype] for spec in specs]:
            raise EntryError("its model's inputs or outputs differ from those of its header")
    for tensor in chain(_tensors(model.graph), *(map(_tensors_of, model.functions))):
        if tensor.data_location != onnx.TensorProto.DEFAULT or tensor.external_data:
            raise EntryError("its model has data in another file")


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """All tensors that a graph holds, and its sub-graphs."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _tensors_of(graph)


def _tensors_of(nodes: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """All tensors that nodes hold."""
    for node in nodes.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _read_kernels(text: str) -> tuple[FusedOp, ...]:
    try:
        return fused_ops_from_json(text)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise EntryError(f"its kernels are invalid: {error!r:.200}") from error


# -- JSON ------------------------------------------------------------------------------------------------------------


def _field(header: Mapping[str, Any], name: str, kind: type) -> Any:
    value = header.get(name)
    if not isinstance(value, kind):
        raise EntryError(f"its {name} is {value!r:.80}")
    return value


def _items(header: Mapping[str, Any], name: str) -> Iterable[Any]:
    return _list(_field(header, name, list))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise EntryError(f"{value!r:.80} is not a list")
    return value


def _mapping(header: Mapping[str, Any], name: str, read: Callable[[Any], Any]) -> dict[str, Any]:
    return {key: read(value) for key, value in _field(header, name, dict).items()}


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise EntryError(f"{value!r:.80} is not a number >= 0")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1 << 63:  # nor is NaN
        raise EntryError(f"{value!r:.80} is not a number")
    return float(value)
