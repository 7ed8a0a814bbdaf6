"""A fused kernel as a custom operator of a session: its types, its shapes, its source and how it is launched.

Passes make these values, the cache stores them, and the runtime compiles and registers them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DOMAIN",
    "ITSELF",
    "POINTERS",
    "FusedOp",
    "FusedOutput",
    "Size",
    "fused_ops_from_json",
    "fused_ops_to_json",
]

DOMAIN = "ort_dynamo.fused"
"""The domain of every fused operator."""

ITSELF = -1
"""The axis of a symbol whose value is not a dimension of its input, but the input: one int64, which is on the host."""

POINTERS: Mapping[int, str] = {
    1: "*fp32",
    2: "*u8",
    3: "*i8",
    5: "*i16",
    6: "*i32",
    7: "*i64",
    9: "*i1",
    10: "*fp16",
    11: "*fp64",
    16: "*bf16",
}
"""ONNX element type (TensorProto.DataType) -> Triton's name of a pointer to it."""


@dataclass(frozen=True)
class Size:
    """A number of elements: a constant, or a constant by symbols.

    Attributes:
        factor: the constant.
        symbols: indices into `FusedOp.symbols`, sorted; one that occurs twice is squared.
    """

    factor: int = 1
    symbols: tuple[int, ...] = ()

    def __mul__(self, other: Size) -> Size:
        return Size(self.factor * other.factor, tuple(sorted((*self.symbols, *other.symbols))))

    def value(self, symbols: Sequence[int]) -> int:
        """Return the number, by the value of each symbol."""
        return self.factor * math.prod(symbols[symbol] for symbol in self.symbols)


@dataclass(frozen=True)
class FusedOutput:
    """One result of a fused operator.

    Attributes:
        dtype: its element type, by ONNX's number (TensorProto.DataType).
        shape: its dimensions; a scalar has none.
    """

    dtype: int
    shape: tuple[Size, ...]


@dataclass(frozen=True)
class FusedOp:
    """One kernel, and the custom operator that launches it.

    The kernel's parameters are a pointer for each input, a pointer for each output, and each symbol as an int64. The
    pointer of a number on the host is null.
    It runs as ceil(count / per_program) programs in one dimension; if that is 0, it does not run.

    Attributes:
        name: the operator's type in the domain `ort_dynamo.fused`, and the name of the function in the source.
        inputs: the element types, as in ONNX's TensorProto. Tensors are contiguous.
        outputs: the element types and shapes.
        symbols: for each symbol, (index of an input, axis) with its size; with ITSELF for an axis, of a number.
        count: the number of elements, or rows, divided among programs.
        per_program: how many of these each program computes.
        source: the kernel in Triton's language: a module with one `triton.jit` function.
        num_warps: the warps of each program.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[FusedOutput, ...]
    symbols: tuple[tuple[int, int], ...]
    count: Size
    per_program: int
    source: str = dataclasses.field(repr=False)
    num_warps: int = 4

    def programs(self, symbols: Sequence[int]) -> int:
        """Count the programs of a launch."""
        return -(-self.count.value(symbols) // self.per_program)

    @property
    def numbers(self) -> frozenset[int]:
        """The indices of inputs that are numbers on the host."""
        return frozenset(index for index, axis in self.symbols if axis == ITSELF)


def fused_ops_to_json(ops: Sequence[FusedOp]) -> str:
    """Return the text of these operators, for a cache entry."""
    return json.dumps([dataclasses.asdict(op) for op in ops])


def fused_ops_from_json(text: str) -> tuple[FusedOp, ...]:
    """Return the operators of a text that `fused_ops_to_json` has made.

    Raises:
        ValueError, TypeError, KeyError: it is another text.
    """
    ops = tuple(map(_op, _entries(json.loads(text))))
    if len({op.name for op in ops}) != len(ops):
        raise ValueError("two kernels have one name")
    return ops


_LONGEST_NAME = 200
_MOST_WARPS = 64


def _op(given: dict[str, Any]) -> FusedOp:
    name, source = given["name"], given["source"]
    if not (isinstance(name, str) and name.isascii() and name.isidentifier() and len(name) <= _LONGEST_NAME):
        raise ValueError(f"{name!r:.80} is not the name of a kernel")
    if not isinstance(source, str):
        raise TypeError(f"the source of {name} is not a text")
    return FusedOp(
        **{
            **given,
            "inputs": tuple(map(_integer, _entries(given["inputs"]))),
            "outputs": tuple(
                FusedOutput(_integer(one["dtype"]), tuple(map(_size, _entries(one["shape"]))))
                for one in _entries(given["outputs"])
            ),
            "symbols": tuple(
                (_integer(index), _integer(axis, least=ITSELF)) for index, axis in _entries(given["symbols"])
            ),
            "count": _size(given["count"]),
            "per_program": _integer(given["per_program"], least=1),
            "num_warps": _integer(given["num_warps"], least=1, most=_MOST_WARPS),
        }
    )


def _size(given: dict[str, Any]) -> Size:
    return Size(_integer(given["factor"]), tuple(map(_integer, _entries(given["symbols"]))))


def _entries(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is not a list")
    return value


def _integer(value: Any, *, least: int = 0, most: int = (1 << 63) - 1) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.80} is not a number from {least} to {most}")
    return value
