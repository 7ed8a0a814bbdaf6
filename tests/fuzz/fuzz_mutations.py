"""Damage to bytes, texts, ONNX models and nested values, chosen by a generator of random numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import AttributeProto, TensorProto, helper

__all__ = [
    "NAMES",
    "BytesRandom",
    "damage_bytes",
    "damage_json",
    "damage_model",
    "damage_value",
    "messages",
    "odd_array",
    "rename_value",
]

NUMBERS = [-3, -1, 0, 1, 2, 3, 7, 1023, 1025, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)]
NAMES = [
    *("", "x", "y", "w", "\uff57", "é", "class", "None", "lambda", "self", "own", "a.b", "a..b", ".", "..", "/", "\0"),
    *("../../secret", "/etc/passwd", "a/../../b", "C:\\secret", "con", "%s%n", "a\nb", "a'b", 'a"b', '"""', "\\", "*/"),
    *("__import__('os').system('touch escaped')", "__class__", "forward", "_parameters", "</script><script>alert(1)"),
    *("\u2028", "\u200b", "\U0001f600", "a" * 5000, "ai.onnx", "com.microsoft", "axis", "Add", "Relu", "Loop", "Shape"),
]
"""Names that mean something to Python, C, HTML, a shell or a file system."""


class BytesRandom(random.Random):
    """Takes its choices from bytes, for a fuzzer that is guided by coverage; zeros follow."""

    def __new__(cls, data: bytes) -> BytesRandom:  # whose base would hash the data
        return super().__new__(cls)

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._place = data, 0

    def getrandbits(self, count: int) -> int:
        size = (count + 7) // 8
        taken = self._data[self._place : self._place + size]
        self._place += size
        return int.from_bytes(taken, "little") & ((1 << count) - 1)

    def random(self) -> float:
        return self.getrandbits(53) / (1 << 53)


def damage_bytes(data: bytes, rng: random.Random, start: int = 0) -> bytes:
    """Flip, set, remove, insert, repeat or cut bytes, from `start` on."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if len(damaged) <= start:
            break
        place = rng.randrange(start, len(damaged))
        end = min(len(damaged), place + rng.choice((1, 2, 8, 64)))
        match rng.randrange(7):
            case 0:
                damaged[place] ^= 1 << rng.randrange(8)
            case 1:
                damaged[place] = rng.choice((0, 1, 127, 128, 255))
            case 2:
                damaged[place] = rng.randrange(256)
            case 3:
                del damaged[place:end]
            case 4:
                damaged[place:place] = rng.choice(NAMES).encode()
            case 5:
                damaged[place:place] = damaged[place:end] * rng.choice((1, 3, 30))
            case 6:
                damaged = damaged[:place]
    return bytes(damaged)


# -- values of JSON, and of checkpoints ------------------------------------------------------------------------------


def odd_value(rng: random.Random, deep: bool = True) -> Any:
    """Return a value of JSON that few programs expect."""
    one: Callable[[], Any] = rng.choice(
        [
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice((0.5, -1.0, 1e308, float("inf"), float("nan"), 10**400, 2**64)),
            lambda: rng.choice(NAMES),
            lambda: rng.choice((True, False, None)),
            list,
            dict,
            lambda: [odd_value(rng, False) for _ in range(rng.randrange(4))] if deep else [],
            lambda: {rng.choice(NAMES): odd_value(rng, False)} if deep else {},
            lambda: _nested(rng.choice((3, 70, 900))) if deep else 0,
        ]
    )
    return one()


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def damage_value(value: Any, rng: random.Random, odd: Callable[[random.Random], Any] = odd_value) -> Any:
    """Return a nested value with one part replaced, removed, renamed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        match rng.randrange(6):
            case 0:
                return {name: one for name, one in value.items() if name != key}
            case 1:
                return {**value, rng.choice(NAMES): value[key]}
            case 2:
                return {(rng.choice(NAMES) if name == key else name): one for name, one in value.items()}
            case _:
                return {**value, key: damage_value(value[key], rng, odd)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        match rng.randrange(4):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return [*value, value[place]]
            case _:
                return [*value[:place], damage_value(value[place], rng, odd), *value[place + 1 :]]
    return odd(rng)


def damage_json(value: Any, rng: random.Random) -> str:
    """Return the text of a damaged value, with damage to the text itself now and then."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = damage_value(value, rng)
    text = json.dumps(value)
    if rng.random() < 0.2:
        text = damage_bytes(text.encode(), rng).decode("utf-8", "replace")
    return text


# -- ONNX models -----------------------------------------------------------------------------------------------------


def messages(message: Message) -> Iterator[Message]:
    """Yield a message and all in it."""
    yield message
    for field, found in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for one in found if hasattr(found, "append") else [found]:
                yield from messages(one)


def damage_model(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change fields of a model, or its structure, in place."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        if rng.random() < 0.5:
            parts = list(messages(model))
            _change_field(rng.choice(parts), rng)
        else:
            rng.choice(_STRUCTURES)(model, rng)


def _change_field(message: Message, rng: random.Random) -> None:
    field = rng.choice(message.DESCRIPTOR.fields)
    held = getattr(message, field.name)
    repeated = hasattr(held, "append") or hasattr(held, "add")
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        if not repeated:
            message.ClearField(field.name)
        elif held and rng.random() < 0.5:
            held.append(rng.choice(list(held)))
        elif held:
            del held[rng.randrange(len(held))]
        else:
            held.add()
        return
    new = _field_value(field, rng)
    if not repeated:
        setattr(message, field.name, new)
    elif held and rng.random() < 0.7:
        held[rng.randrange(len(held))] = new
    else:
        held.append(new)


def _field_value(field: FieldDescriptor, rng: random.Random) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(NAMES)
        case FieldDescriptor.TYPE_BYTES:
            return rng.choice((b"", b"\xff", rng.randbytes(rng.randrange(20)), rng.choice(NAMES).encode()))
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return rng.choice((0.0, -1.0, 1e30, float("inf"), float("nan")))
        case FieldDescriptor.TYPE_INT64:
            return rng.choice(NUMBERS)
        case FieldDescriptor.TYPE_UINT64:
            return abs(rng.choice(NUMBERS))
        case FieldDescriptor.TYPE_ENUM if field.enum_type is not None:
            return rng.choice(list(field.enum_type.values_by_number))
    return rng.randrange(-3, 40)


def _tensors(model: onnx.ModelProto) -> list[TensorProto]:
    return [one for one in messages(model) if isinstance(one, TensorProto)]


def _resize(model: onnx.ModelProto, rng: random.Random) -> None:
    for tensor in _tensors(model)[:1] if rng.random() < 0.3 else _tensors(model):
        if rng.random() < 0.5:
            tensor.dims[:] = [rng.choice(NUMBERS) for _ in range(rng.choice((0, 1, 2, 5, 70)))]


def _refill(model: onnx.ModelProto, rng: random.Random) -> None:
    if found := _tensors(model):
        rng.choice(found).raw_data = rng.randbytes(rng.choice((0, 1, 3, 64, 1000)))


def _point_outside(model: onnx.ModelProto, rng: random.Random) -> None:
    if found := _tensors(model):
        tensor = rng.choice(found)
        tensor.data_location = TensorProto.EXTERNAL
        where = rng.choice((*NAMES, "../secret", "link", "in.onnx", "/dev/zero", "/proc/self/environ"))
        tensor.external_data.add(key="location", value=where)
        for key in ("offset", "length"):
            if rng.random() < 0.5:
                tensor.external_data.add(key=key, value=rng.choice((*map(str, NUMBERS), "x", "", "9" * 30)))


def rename_value(model: onnx.ModelProto, rng: random.Random) -> None:
    """Rename one value wherever it occurs."""
    every = [name for node in model.graph.node for name in (*node.input, *node.output) if name]
    old, new = rng.choice(every or ["x"]), rng.choice(NAMES)
    for one in messages(model):
        if isinstance(one, onnx.NodeProto):
            one.input[:] = [new if name == old else name for name in one.input]
            one.output[:] = [new if name == old else name for name in one.output]
        elif isinstance(one, (TensorProto, onnx.ValueInfoProto)) and one.name == old:
            one.name = new


def _tangle(model: onnx.ModelProto, rng: random.Random) -> None:
    """Let a node read another's output, or move it."""
    nodes = model.graph.node
    if len(nodes) < 2:
        return
    first, second = rng.choice(nodes), rng.choice(nodes)
    if rng.random() < 0.3:
        nodes.reverse()
    elif first.input and second.output:
        first.input[rng.randrange(len(first.input))] = rng.choice(second.output)


def _nest(model: onnx.ModelProto, rng: random.Random) -> None:
    """Put the nodes of the graph into graphs within graphs."""
    inner = onnx.GraphProto()
    inner.CopyFrom(model.graph)
    for _ in range(rng.choice((1, 3, 19, 25, 40))):
        outer = onnx.GraphProto(name="outer")
        node = outer.node.add(op_type=rng.choice(("If", "Loop", "Scan", "Relu")), input=["c"])
        node.output.extend(one.name for one in inner.output)
        for name in ("then_branch", "else_branch") if rng.random() < 0.1 else ("body",):
            node.attribute.add(name=name, type=AttributeProto.GRAPH).g.CopyFrom(inner)
        outer.input.extend(inner.input)
        outer.output.extend(inner.output)
        if outer.ByteSize() > 1 << 20:
            break
        inner = outer
    model.graph.CopyFrom(inner)


def _call(model: onnx.ModelProto, rng: random.Random) -> None:
    """Add functions that call one another, and a call."""
    count, calls = rng.choice((1, 2, 10, 30)), rng.choice((1, 1, 10))
    model.opset_import.append(helper.make_opsetid("own", 1))
    for index in range(count):
        called = f"f{(index + 1) % count if rng.random() < 0.5 else index + 1}"
        last = index == count - 1 and rng.random() < 0.8
        nodes = [] if last else [helper.make_node(called, ["a"], [f"v{at}"], domain="own") for at in range(calls)]
        nodes.append(helper.make_node("Identity", ["a"], ["b"]))
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        model.functions.append(helper.make_function("own", f"f{index}", ["a"], ["b"], nodes, imports))
    if model.graph.node:
        node = rng.choice(model.graph.node)
        node.domain, node.op_type = "own", "f0"
        del node.attribute[:]


def _operator(model: onnx.ModelProto, rng: random.Random) -> None:
    if model.graph.node:
        rng.choice(model.graph.node).op_type = rng.choice(OPERATORS)


OPERATORS = sorted({schema.name for schema in onnx.defs.get_all_schemas()})
_STRUCTURES: list[Callable[[onnx.ModelProto, random.Random], None]] = [
    *(_resize, _refill, _point_outside, rename_value, _tangle, _nest, _call, _operator)
]


def odd_array(rng: random.Random) -> Any:
    """Return a value that a checkpoint can hold and a trainer does not expect."""
    arrays: list[Callable[[], Any]] = [
        lambda: np.array(rng.choice((np.inf, np.nan, -1.0))),
        lambda: np.zeros(rng.choice(((0,), (3,), (2, 3), (8, 4), (1, 1, 1, 1)))),
        lambda: np.ones(4, dtype=rng.choice((np.int8, np.uint64, np.float16, bool, np.complex64))),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice((0.5, float("inf"), float("nan"))),
        lambda: rng.choice([name for name in NAMES if len(name) < 100]),
        lambda: rng.choice((True, False, b"\x80\x04.")),
        dict,
        lambda: {"a": {"b": np.float64(1)}},
    ]
    return rng.choice(arrays)()
