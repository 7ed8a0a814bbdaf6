"""Sliding and pooling windows: their sizes, and tables of the indices under them where ONNX has no operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.torch_internals.sizes.symbols import expression, known_true

__all__ = [
    "Pool",
    "Sliding",
    "Windows",
    "adaptive_windows",
    "fixed",
    "gather_windows",
    "sliding_windows",
    "window_sum",
]


def fixed(sizes: Sequence[Size]) -> list[int] | None:
    """`sizes` as plain ints, or None where one is symbolic."""
    return [int(size) for size in sizes] if all(expression(size).is_Integer for size in sizes) else None


@dataclass(frozen=True)
class Sliding:
    """A window sliding over the last dimensions of an image (N, C, *sizes); one entry for each of them.

    Attributes:
        sizes: the sizes of the image.
        out: the number of window positions.
    """

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    sizes: tuple[Size, ...]
    out: tuple[Size, ...]

    @property
    def rank(self) -> int:
        """Number of dimensions that the window slides along."""
        return len(self.kernel)

    @property
    def reach(self) -> list[int]:
        """From the first to the last position under the window."""
        return [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]

    @property
    def is_tiled(self) -> bool:
        """True if the positions of the window lie side by side."""
        return self.stride == self.kernel and set(self.dilation) == {1}

    @property
    def covered(self) -> list[Size]:
        """From the first position of the first window to the last position of the last one."""
        return [(m - 1) * s + reach + 1 for m, s, reach in zip(self.out, self.stride, self.reach, strict=True)]

    @property
    def remainders(self) -> list[Size]:
        """Count the last positions of each padded axis that no window reaches; the stride skips them."""
        return [n + 2 * p - covered for n, p, covered in zip(self.sizes, self.padding, self.covered, strict=True)]


@dataclass(frozen=True)
class Pool(Sliding):
    """Pooling over the last `rank` dimensions; with `ceil_mode`, the last window may exceed the input."""

    ceil_mode: bool

    @classmethod
    def of(
        cls,
        sizes: Sequence[Size],
        out: Sequence[Size],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        ceil_mode: bool,
        rank: int,
    ) -> Pool:
        """Read ATen's arguments: a single integer is repeated; without a stride, it is the kernel size.

        `sizes` and `out` are whole shapes.
        """

        def each(numbers: int | Sequence[int]) -> list[int]:
            listed = [numbers] if isinstance(numbers, int) else list(numbers)
            return listed * rank if len(listed) == 1 else listed

        return cls(
            each(kernel),
            each(stride) if isinstance(stride, int) or len(stride) else each(kernel),
            each(padding),
            each(dilation),
            tuple(sizes[-rank:]),
            tuple(out[-rank:]),
            ceil_mode,
        )

    @classmethod
    def tiles(cls, sizes: Sequence[Size], out: Sequence[Size], rank: int) -> Pool | None:
        """Adaptive pooling from `sizes` to `out`, where its windows are known to be tiles of one size."""
        lengths, counts = fixed(sizes[-rank:]), fixed(out[-rank:])
        if lengths is None or counts is None or 0 in counts or any(n % m for n, m in zip(lengths, counts, strict=True)):
            return None
        kernel = [n // m for n, m in zip(lengths, counts, strict=True)]
        return cls.of(sizes, out, kernel, (), (0,), (1,), False, rank)

    @property
    def places(self) -> int:
        """Under one window."""
        return math.prod(self.kernel)

    @property
    def excess(self) -> list[Size]:
        """By how much the last window exceeds the input; negative where it ends before the input does."""
        return [covered - p - n for covered, p, n in zip(self.covered, self.padding, self.sizes, strict=True)]

    @property
    def ends(self) -> list[int]:
        """Padding at the end with which the windows of ceil_mode fit as they do without it.

        Where a size is symbolic, it is the most that they may exceed the input by. torch drops a window that starts
        beyond the input and its padding, which then takes s - 1 + p >= kernel: `fits_onnx` is false.
        """
        if (excess := fixed(self.excess)) is not None:
            return [max(e, 0) for e in excess]
        more = [s - 1 if self.ceil_mode else 0 for s in self.stride]
        return [p + m for p, m in zip(self.padding, more, strict=True)]

    @property
    def fits_onnx(self) -> bool:
        """ONNX Runtime takes paddings below the kernel's size only."""
        return all(max(p, e) < k for p, e, k in zip(self.padding, self.ends, self.kernel, strict=True))

    @property
    def has_elements(self) -> bool:
        """True if each window is known to have an element; one dilated by more than the size may step over them."""
        axes = zip(self.padding, self.dilation, self.sizes, strict=True)
        return all(p == 0 or d == 1 or known_true(d <= s) for p, d, s in axes)

    @property
    def is_disjoint(self) -> bool:
        """True if no two windows share an element."""
        return all(s > reach for s, reach in zip(self.stride, self.reach, strict=True))

    @property
    def covers(self) -> bool:
        """True if the windows are tiles that leave out no element of the input."""
        tiles = zip(self.out, self.stride, self.sizes, strict=True)
        return self.is_tiled and not any(self.padding) and all(expression(m * s) == expression(n) for m, s, n in tiles)


@dataclass(frozen=True)
class Windows:
    """The windows along one axis.

    Attributes:
        index: int64 (out, longest), the indices of the input under each window, clamped into the input.
        inside: bool (out, longest), which of them are under the window and in the input.
    """

    index: ir.Value
    inside: ir.Value

    def lengths(self, ctx: LoweringContext, dtype: torch.dtype) -> ir.Value:
        """Count the elements of the input in each window, (out,)."""
        return ctx.op.ReduceSum(ctx.cast(self.inside, dtype), [1], keepdims=0)

    def gather(self, op: OpBuilder, value: ir.Value, rank: int, axis: int) -> ir.Value:
        """Gather a value (…, size, …) of `rank` dimensions to (…, out, longest, …), with zeros outside of the input."""
        found = op.Gather(value, self.index, axis=axis)
        inside = op.Unsqueeze(self.inside, list(range(2, rank - axis + 1))) if axis < rank - 1 else self.inside
        return op.Where(inside, found, 0.0)


def _column(ctx: LoweringContext, size: Size) -> ir.Value:
    """0, 1, … size - 1 as an int64 (size, 1)."""
    return ctx.op.Reshape(ctx.op.Range(0, ctx.scalar(size, torch.int64), 1), [-1, 1])


def _table(ctx: LoweringContext, places: ir.Value, inside: ir.Value, size: ir.Value) -> Windows:
    op = ctx.op
    return Windows(op.Max(op.Min(places, op.Sub(size, 1)), 0), inside)


def sliding_windows(
    ctx: LoweringContext, size: Size, out: Size, kernel: int, stride: int, padding: int, dilation: int
) -> Windows:
    """Make windows of `kernel` elements, `stride` apart."""
    op = ctx.op
    starts = op.Sub(op.Mul(_column(ctx, out), stride), padding)
    places = op.Add(starts, ctx.ints([dilation * k for k in range(kernel)]))
    length = ctx.scalar(size, torch.int64)
    return _table(ctx, places, op.And(op.GreaterOrEqual(places, 0), op.Less(places, length)), length)


def adaptive_windows(ctx: LoweringContext, size: Size, out: Size) -> Windows:
    """Make adaptive windows: window i is from floor(i * size / out) to ceil((i + 1) * size / out).

    With `size` and `out` exchanged, these are the windows that each position of the input belongs to.
    """
    op = ctx.op
    row, length, count = _column(ctx, out), ctx.scalar(size, torch.int64), ctx.scalar(out, torch.int64)
    starts = op.Div(op.Mul(row, length), count)
    ends = op.Div(op.Add(op.Mul(op.Add(row, 1), length), op.Sub(count, 1)), count)
    longest = op.ReduceMax(op.Sub(ends, starts), keepdims=0)
    places = op.Add(starts, op.Range(0, longest, 1))
    return _table(ctx, places, op.Less(places, ends), length)


def window_sum(ctx: LoweringContext, value: ir.Value, rank: int, windows: Sequence[Windows]) -> ir.Value:
    """Take the sums of a value of `rank` dimensions over windows along the last ones."""
    for axis, window in enumerate(windows, start=rank - len(windows)):
        value = ctx.op.ReduceSum(window.gather(ctx.op, value, rank, axis), [axis + 1], keepdims=0)
    return value


def gather_windows(op: OpBuilder, value: ir.Value, rank: int, windows: Sequence[Windows]) -> ir.Value:
    """Gather a value (…, *sizes) of `rank` dimensions to (…, *out, *longest)."""
    first, count = rank - len(windows), len(windows)
    for axis, window in enumerate(windows):
        value = op.Gather(value, window.index, axis=first + 2 * axis)
    pairs = range(first, first + 2 * count)
    return op.Transpose(value, perm=[*range(first), *pairs[::2], *pairs[1::2]])
