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

import onnx_ir as ir

__all__ = ["DOMAIN", "OWN_KERNELS", "FusedOp", "FusedOutput", "Size", "fused_ops_from_json", "fused_ops_to_json"]

DOMAIN = "ort_dynamo.fused"
"""The domain of every fused operator."""

OWN_KERNELS: Mapping[str, frozenset[ir.DataType]] = dict.fromkeys(
    ("BitwiseAnd", "BitwiseOr", "BitwiseXor"), frozenset({ir.DataType.INT32, ir.DataType.INT64})
)
"""ONNX operator without a kernel in CUDA's provider -> types for which one node of it becomes a fused kernel.

If the fused kernel cannot be compiled, ONNX Runtime runs the node on the CPU, between copies.
"""


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

    The kernel's parameters are a pointer for each input, a pointer for each output, and each symbol as an int64.
    It runs as ceil(count / per_program) programs in one dimension; if that is 0, it does not run.

    Attributes:
        name: the operator's type in the domain `ort_dynamo.fused`, and the name of the function in the source.
        inputs: the element types, as in ONNX's TensorProto. Tensors are contiguous.
        outputs: the element types and shapes.
        symbols: for each symbol, (index of an input, axis) with its size.
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


def fused_ops_to_json(ops: Sequence[FusedOp]) -> str:
    """Return the text of these operators, for a cache entry."""
    return json.dumps([dataclasses.asdict(op) for op in ops])


def fused_ops_from_json(text: str) -> tuple[FusedOp, ...]:
    """Return the operators of a text that `fused_ops_to_json` has made.

    Raises:
        ValueError, TypeError, KeyError: it is another text.
    """
    return tuple(map(_op, json.loads(text)))


def _op(given: dict[str, Any]) -> FusedOp:
    outputs = tuple(FusedOutput(one["dtype"], tuple(map(_size, one["shape"]))) for one in given["outputs"])
    symbols = tuple((index, axis) for index, axis in given["symbols"])
    changed = {"inputs": tuple(given["inputs"]), "outputs": outputs, "symbols": symbols, "count": _size(given["count"])}
    return FusedOp(**{**given, **changed})


def _size(given: dict[str, Any]) -> Size:
    return Size(given["factor"], tuple(given["symbols"]))
