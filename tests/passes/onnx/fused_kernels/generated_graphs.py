"""Random ONNX graphs of operators that FuseKernels joins, and of operators that it must not join."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper

__all__ = ["GraphMaker", "as_numpy", "as_torch", "inputs_of"]

_UNARY = ("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Neg", "Relu", "Round", "Sigmoid", "Sin", "Sqrt", "Tanh")
_BINARY = ("Add", "Div", "Max", "Min", "Mul", "Sub")
_COMPARE = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


_KINDS = (
    *("unary", "binary", "binary", "half", "half", "where", "row", "row", "column", "move", "scalar", "product"),
    *("pieces", "pieces", "rotate", "rotate", "gather", "scatter"),
)
"""Kinds of additions to a graph, each the name of a method; a kind that is there twice is twice as frequent."""

_SYMBOLIC_ROWS = 13
"""Stands for a symbolic size while a graph is made; no other size is a multiple of it."""


class GraphMaker:
    """Makes one model of a seed: float32 values of a few shapes that broadcast, half types between casts."""

    def __init__(self, seed: int, *, symbolic: bool = False) -> None:
        self._random = random.Random(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._inputs: list[str] = []
        self._values: dict[str, tuple[int, tuple[int, ...]]] = {}
        self._count = 0
        self._rows = _SYMBOLIC_ROWS if symbolic else self._random.choice([1, 3, 8, 20, 149, 160])
        self._inner = self._random.choice([1, 4, 6])
        self._columns = self._random.choice([1, 2, 7, 16, 48])
        self._symbolic = symbolic

    def model(self, nodes: int = 16) -> onnx.ModelProto:
        """A model of about this number of nodes."""
        r, m, c = self._rows, self._inner, self._columns
        self._inputs += [
            self._value(TensorProto.FLOAT, shape) for shape in ((r, m, c), (r, m, c), (c,), (r, m, 1), (m, c), ())
        ]
        self._inputs.append(self._value(TensorProto.BFLOAT16, (r, m, c)))
        while len(self._nodes) < nodes:
            self._grow()
        read = {name for node in self._nodes for name in node.input}
        made = [name for node in self._nodes for name in node.output]
        outputs = [name for name in made if name not in read or self._random.random() < 0.15]
        graph = helper.make_graph(
            self._nodes,
            "generated",
            [self._info(name) for name in self._inputs],
            [self._info(name) for name in outputs],
            initializer=self._constants,
        )
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def _info(self, name: str) -> onnx.ValueInfoProto:
        dtype, shape = self._values[name]
        dims = [self._dim(size) for size in shape]
        return helper.make_tensor_value_info(name, dtype, dims)

    def _dim(self, size: int) -> int | str:
        if not self._symbolic or size % _SYMBOLIC_ROWS:
            return size
        return "rows" if size == _SYMBOLIC_ROWS else f"{size // _SYMBOLIC_ROWS}*rows"

    def _value(self, dtype: int, shape: tuple[int, ...]) -> str:
        self._count += 1
        name = f"v{self._count}"
        self._values[name] = (dtype, shape)
        return name

    def _constant(self, array: np.ndarray) -> str:
        self._count += 1
        self._constants.append(onnx.numpy_helper.from_array(array, f"c{self._count}"))
        return f"c{self._count}"

    def _pick(self, dtype: int, shape: tuple[int, ...] | None = None) -> str | None:
        found = [n for n, (d, s) in self._values.items() if d == dtype and (shape is None or s == shape)]
        return self._random.choice(found[-8:]) if found else None

    def _node(
        self, op: str, read: list[str], dtype: int, shape: tuple[int, ...], domain: str = "", **attributes: object
    ) -> str:
        name = self._value(dtype, shape)
        self._nodes.append(helper.make_node(op, read, [name], domain=domain, **attributes))
        return name

    def _grow(self) -> None:
        kind = self._random.choice(_KINDS)
        x = self._pick(TensorProto.FLOAT)
        assert x is not None
        _, shape = self._values[x]
        getattr(self, f"_{kind}")(x, shape)

    def _unary(self, x: str, shape: tuple[int, ...]) -> None:
        op = self._random.choice(_UNARY)
        x = self._node("Abs", [x], TensorProto.FLOAT, shape) if op == "Sqrt" else x
        self._node(op, [x], TensorProto.FLOAT, shape)

    def _binary(self, x: str, shape: tuple[int, ...]) -> None:
        y = self._pick(TensorProto.FLOAT)
        assert y is not None
        try:
            both = np.broadcast_shapes(shape, self._values[y][1])
        except ValueError:
            return
        op = self._random.choice(_BINARY)
        if op == "Div":
            y = self._node(
                "Exp",
                [self._node("Tanh", [y], TensorProto.FLOAT, self._values[y][1])],
                TensorProto.FLOAT,
                self._values[y][1],
            )
        self._node(op, [x, y], TensorProto.FLOAT, both)

    def _half(self, x: str, shape: tuple[int, ...]) -> None:
        half = self._random.choice([TensorProto.BFLOAT16, TensorProto.FLOAT16])
        narrow = self._pick(half) if self._random.random() < 0.5 else None
        narrow = narrow or self._node("Cast", [x], half, shape, to=half)
        self._node("Cast", [narrow], TensorProto.FLOAT, self._values[narrow][1], to=TensorProto.FLOAT)

    def _where(self, x: str, shape: tuple[int, ...]) -> None:
        y = self._pick(TensorProto.FLOAT, shape)
        assert y is not None
        condition = self._node(self._random.choice(_COMPARE), [x, y], TensorProto.BOOL, shape)
        if self._random.random() < 0.5:
            condition = self._node("Not", [condition], TensorProto.BOOL, shape)
        self._node("Where", [condition, x, y], TensorProto.FLOAT, shape)

    def _row(self, x: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 3:
            return
        op = self._random.choice(
            ["ReduceSum", "ReduceMean", "ReduceMax", "Softmax", "LogSoftmax", "LayerNormalization"]
        )
        if op == "LayerNormalization":
            weight = self._pick(TensorProto.FLOAT, shape[-1:])
            read = [x, weight or self._constant(np.full(shape[-1:], 2, np.float32))]
            names = [self._value(TensorProto.FLOAT, s) for s in (shape, (*shape[:2], 1), (*shape[:2], 1))]
            self._nodes.append(helper.make_node(op, read, names, axis=-1))
        elif "Reduce" in op:
            kept = self._random.random() < 0.7
            axes = self._constant(np.array([-1]))
            self._node(op, [x, axes], TensorProto.FLOAT, (*shape[:2], 1) if kept else shape[:2], keepdims=int(kept))
        else:
            self._node(op, [x], TensorProto.FLOAT, shape, axis=-1)

    def _column(self, x: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 3:
            return
        leading = self._random.choice([1, 2])
        axes = self._constant(np.arange(leading))
        self._node("ReduceSum", [x, axes], TensorProto.FLOAT, shape[leading:], keepdims=0)

    def _move(self, x: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or sum(isinstance(self._dim(size), str) for size in shape) > 1:
            return
        r, m, c = shape
        other = self._random.choice([(r * m, c), (r, m * c), (r * m * c,), (1, r, m, c), "transpose"])
        if other == "transpose":
            turned = self._node("Transpose", [x], TensorProto.FLOAT, (m, r, c), perm=[1, 0, 2])
            turned = self._node("Neg", [turned], TensorProto.FLOAT, (m, r, c))
            self._node("Transpose", [turned], TensorProto.FLOAT, shape, perm=[1, 0, 2])
            return
        assert isinstance(other, tuple)
        flat = self._node("Reshape", [x, self._shape(other)], TensorProto.FLOAT, other)
        changed = self._node("Cos", [flat], TensorProto.FLOAT, other)
        self._node("Reshape", [changed, self._shape(shape)], TensorProto.FLOAT, shape)

    def _pieces(self, x: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 3:
            return
        axis = self._random.choice([1, 2])
        kind = self._random.choice(["concat", "stack", "slice", "split"])
        if kind == "concat":
            y = self._pick(TensorProto.FLOAT, shape)
            assert y is not None
            both = tuple(size * 2 if place == axis else size for place, size in enumerate(shape))
            joined = self._node("Concat", [x, y], TensorProto.FLOAT, both, axis=axis)
            self._node("Neg", [joined], TensorProto.FLOAT, both)
        elif kind == "stack":
            more = [self._pick(TensorProto.FLOAT, shape) or x for _ in range(2)]
            one, zero = (*shape[:1], 1, *shape[1:]), self._constant(np.array([1]))
            rows = [self._node("Unsqueeze", [each, zero], TensorProto.FLOAT, one) for each in (x, *more)]
            stacked = self._node("Concat", rows, TensorProto.FLOAT, (shape[0], 3, *shape[1:]), axis=1)
            self._node("Transpose", [stacked], TensorProto.FLOAT, (shape[0], shape[1], 3, shape[2]), perm=[0, 2, 1, 3])
        elif shape[axis] % 2 == 0 and not isinstance(self._dim(shape[axis]), str):
            half = tuple(size // 2 if place == axis else size for place, size in enumerate(shape))
            if kind == "slice":
                first = self._random.choice([0, 1]) * half[axis]
                numbers = [self._constant(np.array([number])) for number in (first, first + half[axis], axis)]
                self._node(
                    "Cos", [self._node("Slice", [x, *numbers], TensorProto.FLOAT, half)], TensorProto.FLOAT, half
                )
            else:
                names = [self._value(TensorProto.FLOAT, half) for _ in range(2)]
                self._nodes.append(helper.make_node("Split", [x], names, axis=axis, num_outputs=2))
                self._node("Mul", [names[1], names[0]], TensorProto.FLOAT, half)

    def _rotate(self, x: str, shape: tuple[int, ...]) -> None:
        axis = self._random.choice([1, 2])
        if len(shape) != 3 or shape[axis] % 2 or isinstance(self._dim(shape[axis]), str):
            return
        half = tuple(size // 2 if place == axis else size for place, size in enumerate(shape))
        pieces = [self._value(TensorProto.FLOAT, half) for _ in range(2)]
        self._nodes.append(helper.make_node("Split", [x], pieces, axis=axis, num_outputs=2))
        kept = self._random.choice(pieces)
        turned = [self._node("Neg", pieces[1:], TensorProto.FLOAT, half), kept]
        self._node("Concat", turned, TensorProto.FLOAT, shape, axis=axis)

    def _index(self, shape: tuple[int, ...], axis: int) -> str | None:
        """An input with an index for each row of an axis; None if `inputs_of` or NumPy lacks indices for the axis."""
        if not 4 <= shape[axis] <= 32 or isinstance(self._dim(shape[axis]), str):
            return None
        of_row = tuple(1 if place == axis else size for place, size in enumerate(shape))
        if (known := self._pick(TensorProto.INT64, of_row)) is None:
            known = self._value(TensorProto.INT64, of_row)
            self._inputs.append(known)
        return known

    def _gather(self, x: str, shape: tuple[int, ...]) -> None:
        axis = self._random.choice([1, 2])
        if len(shape) != 3 or (index := self._index(shape, axis)) is None:
            return
        self._node("GatherElements", [x, index], TensorProto.FLOAT, self._values[index][1], axis=axis)

    def _scatter(self, x: str, shape: tuple[int, ...]) -> None:
        axis = self._random.choice([1, 2])
        if len(shape) != 3 or (index := self._index(shape, axis)) is None:
            return
        if (update := self._pick(TensorProto.FLOAT, self._values[index][1])) is None:
            return
        reduction = self._random.choice(["none", "add"])
        read = [x, index, update]
        self._node("ScatterElements", read, TensorProto.FLOAT, shape, axis=axis, reduction=reduction)

    def _shape(self, shape: tuple[int, ...]) -> str:
        """A shape: a constant, with -1 for a symbolic size, or one that is computed from the shape of an input."""
        is_known = [isinstance(self._dim(size), int) for size in shape]
        if all(is_known) or self._random.random() < 0.25:
            constant = [size if known else -1 for size, known in zip(shape, is_known, strict=True)]
            return self._constant(np.array(constant))
        of = self._random.choice(self._inputs[:2])
        rows = self._node("Shape", [of], TensorProto.INT64, (1,), start=0, end=1)
        sizes = []
        for size, known in zip(shape, is_known, strict=True):
            number = self._constant(np.array([size if known else size // _SYMBOLIC_ROWS]))
            sizes.append(number if known else self._node("Mul", [rows, number], TensorProto.INT64, (1,)))
        return self._node("Concat", sizes, TensorProto.INT64, (len(shape),), axis=0)

    def _scalar(self, x: str, shape: tuple[int, ...]) -> None:
        number = self._constant(np.array(self._random.choice([0.5, -1.0, 2.0, 0.0]), np.float32))
        self._node(self._random.choice(["Add", "Mul"]), [x, number], TensorProto.FLOAT, shape)

    def _product(self, x: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or isinstance(self._dim(shape[-1]), str):
            return
        weight = self._constant(np.eye(shape[-1], dtype=np.float32) * 0.5)
        self._node("MatMul", [x, weight], TensorProto.FLOAT, shape)


def inputs_of(model: onnx.ModelProto, seed: int, sizes: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    """Standard normal inputs, and indices of an axis of at least four elements."""
    import ml_dtypes

    draws = np.random.default_rng(seed)
    found = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [dim.dim_value or _size(dim.dim_param, sizes or {}) for dim in dims]
        array = np.asarray(draws.standard_normal(shape), np.float32)
        match value.type.tensor_type.elem_type:
            case TensorProto.BFLOAT16:
                array = array.astype(ml_dtypes.bfloat16)
            case TensorProto.INT64:
                array = draws.integers(-4, 4, shape)
        found[value.name] = array
    return found


def _size(dim: str, sizes: dict[str, int]) -> int:
    """A dimension such as 2*rows; a symbol without a size is 5."""
    return math.prod(int(part) if part.isdigit() else sizes.get(part, 5) for part in dim.split("*"))


def as_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor of an array's numbers; ml_dtypes' bfloat16 becomes torch's."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, order="C"))


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """An array of a tensor's numbers; torch's bfloat16 becomes that of ml_dtypes."""
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ir.DataType.BFLOAT16.numpy())
    return tensor.numpy()


class TextMaker:
    """Writes the text of a graph of a seed, node by node."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.constants: dict[str, str] = {}

    def node(self, call: str) -> str:
        self.lines.append(f"v{len(self.lines)} = {call}")
        return f"v{len(self.lines) - 1}"

    def constant(self, *numbers: int) -> str:
        name = f"c{'_'.join(map(str, numbers)).replace('-', 'm')}"
        self.constants[f"int64[{len(numbers)}] {name}"] = ", ".join(map(str, numbers))
        return name

    def graph(self, shape: Sequence[int], result: str) -> str:
        """A graph of x and y, of this shape, and z, with the first two axes exchanged."""
        sizes = ", ".join(map(str, shape))
        turned = ", ".join(map(str, [shape[1], shape[0], *shape[2:]]))
        constants = ", ".join(f"{name} = {{{numbers}}}" for name, numbers in self.constants.items())
        body = "\n".join(self.lines)
        return f"""g (float[{sizes}] x, float[{sizes}] y, float[{turned}] z) => (float[{sizes}] {result})
<{constants}> {{\n{body}\n}}"""
