"""The context of a lowering: the node, its fake outputs, the op builder, the target."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Protocol, cast

import onnx_ir as ir
import torch

from ort_dynamo.errors import UnsupportedNodeError
from ort_dynamo.graph.dtypes import is_representable, onnx_dtype
from ort_dynamo.graph.marks import FOR_KERNEL, HALF
from ort_dynamo.lowering.builder import LoweringBuilder
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.symbols import Symbols
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.pytree import tree_leaves
from ort_dynamo.torch_internals.sizes.symbols import expression, is_empty, known_true

__all__ = ["LoweringContext", "Number", "Size", "Symbolic", "is_empty"]

Number = bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool
Size = int | torch.SymInt


class Symbolic(Protocol):
    """A torch.SymInt, SymFloat or SymBool; pyright, which knows no type of their `node`, would not know ours either."""

    node: Any


_HALF = (torch.float16, torch.bfloat16)
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.float16)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _is_within(number: torch.SymInt | torch.SymFloat, dtype: torch.dtype) -> bool:
    """Check whether the range of a symbolic number is known to be within a dtype's."""
    info: Any = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return (
        isinstance(number, torch.SymInt) and known_true(number >= int(info.min)) and known_true(number <= int(info.max))
    )


def _largest(dtype: torch.dtype) -> float:
    """Return the largest number of a floating dtype; `constant` knows the ranges of integers, some of which wrap."""
    return torch.finfo(dtype).max if dtype.is_floating_point else math.inf


class LoweringContext:
    """The surroundings of one node while it is lowered.

    Attributes:
        node: the FX node.
        out: its fake output: a FakeTensor, or a tuple of FakeTensor | None.
        op: builder of ai.onnx operators.
        contrib: builder of com.microsoft operators; ask `target.has_op` or `target.takes` first.
        target: the target of the compile.
        used: for a node with several outputs, the indices that somebody reads.
    """

    def __init__(
        self,
        builder: LoweringBuilder,
        symbols: Symbols,
        fakes: dict[ir.Value, torch.Tensor],
        node: torch.fx.Node,
    ) -> None:
        self.builder = builder
        self.op: OpBuilder = builder.op
        self.contrib: OpBuilder = builder.opset("com.microsoft", 1)
        self.target: Target = builder.target
        self.node = node
        self.out: Any = node.meta.get("val")
        self.used: frozenset[int] = frozenset(
            int(user.args[1])  # type: ignore[arg-type]
            for user in node.users
            if user.target is operator.getitem
        )
        self._symbols = symbols
        self._fakes = fakes

    # -- facts -------------------------------------------------------------------------------------------------

    @property
    def computes_gradient(self) -> bool:
        """Check whether AOTAutograd traced the node in the backward."""
        return "backward" in self.node.meta.get(HALF, "")

    def fake(self, value: ir.Value) -> torch.Tensor:
        """Return the fake tensor of a tensor argument."""
        return self._fakes[value]

    def sizes(self, value: ir.Value) -> tuple[Size, ...]:
        """Return the shape of a tensor argument; symbolic dimensions are torch.SymInt."""
        return tuple(self.fake(value).shape)

    def rank(self, value: ir.Value) -> int:
        """Return the number of dimensions of a tensor argument."""
        return self.fake(value).dim()

    def dtype(self, value: ir.Value) -> torch.dtype:
        """Return the torch dtype of a tensor argument."""
        return self.fake(value).dtype

    def stand_in(self, value: ir.Value, argument: ir.Value) -> ir.Value:
        """Give `value` the facts of a tensor argument, because it is the same tensor, computed; return it."""
        self._fakes[value] = self._fakes[argument]
        return value

    @staticmethod
    def static(sizes: Sequence[Size], what: str) -> list[int]:
        """Return `sizes` as plain ints; if one is symbolic, refuse the node, with `what` in the reason."""
        if any(isinstance(size, torch.SymInt) and not expression(size).is_Integer for size in sizes):
            raise UnsupportedNodeError(f"{what} is symbolic")
        return [int(size) for size in sizes]

    @staticmethod
    def refuse(reason: str) -> UnsupportedNodeError:
        """Return the error to raise if this node cannot be lowered."""
        return UnsupportedNodeError(reason)

    # -- values ------------------------------------------------------------------------------------------------

    def constant(self, number: bool | int | float, dtype: torch.dtype) -> ir.Value:
        """Return a 0-d constant."""
        return self.builder.constant(number, onnx_dtype(dtype))

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """Return a 1-D int64 constant."""
        return self.builder.constant(list(numbers), ir.DataType.INT64)

    def scalar(self, number: bool | int | float | Symbolic, dtype: torch.dtype) -> ir.Value:
        """Return a 0-d value of a scalar that may be symbolic."""
        if isinstance(number, (torch.SymInt, torch.SymFloat)):
            return self.cast(self._symbols.value(expression(number)), dtype)
        if isinstance(number, torch.SymBool):
            raise UnsupportedNodeError("an argument is a symbolic bool")
        return self.constant(cast(float, number), dtype)

    def element(self, number: bool | int | float | Symbolic, dtype: torch.dtype) -> ir.Value:
        """Return a 0-d value of a scalar that becomes an element of the result, or that bounds its elements.

        Args:
            number: the scalar, which may be symbolic.
            dtype: the dtype of the value, in which the node is computed.

        Raises:
            UnsupportedNodeError: the result's dtype does not hold the number, or may not hold a symbolic one. Torch's
                kernels check that.
        """
        out = self.out.dtype
        if isinstance(number, (torch.SymInt, torch.SymFloat)) and out in _NARROW and not _is_within(number, out):
            raise UnsupportedNodeError(f"torch checks whether {out} holds a symbolic number")
        self.check_range(number)
        return self.scalar(number, dtype)

    def check_range(self, number: bool | int | float | Symbolic) -> None:
        """Refuse the node if the result has a floating dtype that does not hold the number; torch's kernels check it.

        A symbolic number is not checked.
        """
        out = self.out.dtype
        if isinstance(number, (int, float)) and math.isfinite(number) and abs(number) > _largest(out):
            raise UnsupportedNodeError(f"the number {number} is out of the range of {out}")

    def shape(self, sizes: Sequence[Size]) -> ir.Value:
        """Return a 1-D int64 value of sizes, some of which may be symbolic."""
        if not any(isinstance(size, torch.SymInt) for size in sizes):
            return self.ints([int(size) for size in sizes])
        parts = [
            self.op.Reshape(self._symbols.value(expression(size)), [1])
            if isinstance(size, torch.SymInt)
            else self.ints([size])
            for size in sizes
        ]
        return parts[0] if len(parts) == 1 else self.op.Concat(*parts, axis=0)

    def cast(self, value: ir.Value, dtype: torch.dtype) -> ir.Value:
        """Cast `value` to `dtype` for the computation; a value of that dtype is returned as it is.

        If the node's result is float16 or bfloat16, a cast between floating dtypes is marked as one into or out of the
        wider dtype in which it is computed. If the ATen node itself changes the dtype, use `convert`.
        """
        result = self.convert(value, dtype)
        if result is not value and self._is_half and dtype.is_floating_point and value.dtype in _FLOATS:
            node = result.producer()
            assert node is not None
            node.metadata_props[FOR_KERNEL] = "1"
        return result

    def convert(self, value: ir.Value, dtype: torch.dtype) -> ir.Value:
        """Cast `value` to `dtype` because the ATen node asks for it; a value of that dtype is returned as it is."""
        if not is_representable(dtype):
            raise UnsupportedNodeError(f"dtype {dtype} has no ONNX Runtime tensor")
        to = onnx_dtype(dtype)
        return value if value.dtype == to else self.op.Cast(value, to=to)

    def read_rounded(self) -> None:
        """Round this node's arguments to their dtypes before they are read, also if a wider value exists."""
        self.builder.reads_rounded = True

    @functools.cached_property
    def _is_half(self) -> bool:
        return any(isinstance(leaf, torch.Tensor) and leaf.dtype in _HALF for leaf in tree_leaves(self.out))

    def has_fused_matmul(self, value: ir.Value) -> bool:
        """Check whether FusedMatMul, com.microsoft's matmul with transposes and a factor, takes `value`'s dtype."""
        assert value.dtype is not None
        return self.target.takes("FusedMatMul", "com.microsoft", {"T": value.dtype})

    def reshape(self, value: ir.Value, sizes: Sequence[Size]) -> ir.Value:
        """Reshape `value` to `sizes`; a zero is a size, and does not mean "keep"."""
        zero = any(not isinstance(size, torch.SymInt) and size == 0 for size in sizes)
        symbolic = any(isinstance(size, torch.SymInt) for size in sizes)
        # allowzero keeps ONNX Runtime from some fusions, so it is set only where a size is or may be zero.
        return self.op.Reshape(value, self.shape(sizes), **({"allowzero": 1} if zero or symbolic else {}))
