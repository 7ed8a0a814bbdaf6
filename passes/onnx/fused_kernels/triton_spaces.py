"""Distribute the points of a kernel over its programs, in Triton's language."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.fused_kernels.column_sums import TILE_COLUMNS
from ort_dynamo.passes.onnx.fused_kernels.kernel import ColumnSum, Kernel, Load, Term, Total, product, terms

__all__ = ["DTYPES", "Flat", "LongRows", "Rows", "written_size"]

_ELEMENTS = 1024
"""Elements of a program; 8 a thread, which load 16 bytes of a half type at once."""

_WARP_ELEMENTS = 256
"""Elements of a tile for each warp."""

_SUM_COLUMNS, _SUM_ELEMENTS = 16, 4096
"""Least columns, and most elements, of a tile of a program that adds up all rows."""

_LONG_BLOCK = 4096
"""Columns of a tile of a long row."""

DTYPES: Mapping[ir.DataType, str] = {
    ir.DataType.BFLOAT16: "tl.bfloat16",
    ir.DataType.BOOL: "tl.int1",
    ir.DataType.DOUBLE: "tl.float64",
    ir.DataType.FLOAT: "tl.float32",
    ir.DataType.FLOAT16: "tl.float16",
    ir.DataType.INT32: "tl.int32",
    ir.DataType.INT64: "tl.int64",
}
"""Element types that a kernel takes."""


class Flat:
    """All loops as one index."""

    def __init__(self, kernel: Kernel) -> None:
        self.count: Size = kernel.count
        self.per_program: int = _ELEMENTS
        self.num_warps: int = 4
        self._kernel = kernel

    indent = ""

    def head(self) -> Iterator[str]:
        """Yield the lines before the steps."""
        yield f"i = {_program(self._kernel)} * {self.per_program} + tl.arange(0, {self.per_program})"
        yield f"mask = i < {written_size(self.count)}"

    def access(self, strides: Sequence[Size]) -> tuple[str, str]:
        """Return the offset and the mask of an access; an offset of 0 is empty."""
        offset = _offset(terms(self._kernel.loops, strides), "i")
        return offset, "mask" if offset else ""

    def counter(self, loop: int) -> str:
        """Return a loop's counter."""
        return _counter(self._kernel, self.access, loop)

    def place(self, strides: Sequence[Size]) -> tuple[str, str]:
        """Return the offset and the mask of a store; without an offset, it stores the element of the only point."""
        offset, _ = self.access(strides)
        return offset or "i", "mask"

    def added(self) -> Iterator[str]:
        """Nothing: there are no column sums."""
        return iter(())

    tail = added


@dataclass(frozen=True)
class Rows:
    """Tiles of rows: whole rows where these are reduced, else blocks of their columns.

    A program computes one tile; with column sums, the tiles of one part of the rows, one after another.
    """

    kernel: Kernel

    @property
    def columns(self) -> int:
        """Points of a row."""
        return product(self.kernel.column_loops).factor

    @property
    def block(self) -> int:
        """Columns of a tile."""
        whole = 1 << (self.columns - 1).bit_length()
        if self.kernel.has_row_numbers:
            return whole
        least = _SUM_COLUMNS if self._sums_all else TILE_COLUMNS
        return min(whole, max(least, _ELEMENTS // self._most_rows))

    @property
    def blocks(self) -> int:
        """Tiles side by side."""
        return -(-self.columns // self.block)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return min(self._most_rows, max(1, (_SUM_ELEMENTS if self._sums_all else _ELEMENTS) // self.block))

    @property
    def _most_rows(self) -> int:
        """Rows of a part, rounded up to a power of two."""
        part = self.kernel.part
        return _ELEMENTS if part is None else min(_ELEMENTS, 1 << (part - 1).bit_length())

    @property
    def _sums_all(self) -> bool:
        """True if each program adds up all rows, so that there are few programs."""
        return not self.kernel.has_row_numbers and self.kernel.parts == Size()

    @property
    def count(self) -> Size:
        """The rows, or parts of them, that programs share; tiles side by side count as further ones."""
        return (self.kernel.parts if self.kernel.sums_rows else self.kernel.row_count) * Size(self.blocks)

    @property
    def per_program(self) -> int:
        """Rows that each program computes, or parts of them."""
        return 1 if self.kernel.sums_rows else self.rows

    @property
    def num_warps(self) -> int:
        """Warps of each program."""
        return max(1, min(16, self.block * self.rows // _WARP_ELEMENTS))

    @property
    def is_whole(self) -> bool:
        """True if all columns of a tile are columns of the rows."""
        return self.columns % self.block == 0

    def head(self) -> Iterator[str]:
        """Yield the lines before the steps."""
        program, rows = _program(self.kernel), f"tl.arange(0, {self.rows})[:, None]"
        columns = self.block_columns()
        if self.blocks > 1:
            yield f"p = {program}"
            program, columns = f"(p // {self.blocks})", f"p % {self.blocks} * {self.block} + {columns}"
        yield f"c = {columns}"
        if not self.is_whole:
            yield f"columns = c < {self.columns}"
        if not self.kernel.sums_rows:
            yield f"r = {program} * {self.rows} + {rows}"
            yield f"rows = r < {written_size(self.kernel.row_count)}"
        else:
            yield f"part = {program}"
            for name, step in self.accumulators():
                yield f"{name} = tl.zeros([{self.rows}, {self.block}], {DTYPES[self.kernel.steps[step].dtype]})"
            yield from self._rows_of_part(rows)
        if not self.is_whole:
            yield f"{self.indent}mask = rows & columns"

    def _rows_of_part(self, rows: str) -> Iterator[str]:
        """Yield the loop over the rows of a part, tile by tile."""
        kernel, size = self.kernel, str(self.kernel.part)
        if kernel.part is None:
            size = "size"
            parts = kernel.parts.factor
            yield f"size = ({written_size(kernel.row_count)} + {parts - 1}) // {parts}"
        inside = f"within < {size}"
        if not kernel.has_even_parts:
            inside = f"({inside}) & (r < {written_size(kernel.row_count)})"
        yield f"for first in range(0, {size}, {self.rows}):"
        yield f"    within = first + {rows}"
        yield f"    r = part * {size} + within"
        yield f"    rows = {inside}"

    def block_columns(self) -> str:
        """Return the columns of the first tile of a row, in 64 bits where their elements are far apart."""
        return f"tl.arange(0, {self.block})[None, :]{'.to(tl.int64)' if _is_spread(self.kernel) else ''}"

    @property
    def indent(self) -> str:
        """The indentation of the steps."""
        return "    " if self.kernel.sums_rows else ""

    def sums(self) -> Iterator[tuple[int, ColumnSum]]:
        """Yield the column sums, by the index of their output."""
        for number, store in enumerate(self.kernel.stores):
            if isinstance(store, ColumnSum):
                yield number, store

    def accumulators(self) -> Iterator[tuple[str, int]]:
        """Yield the names of the accumulators, and the step of each."""
        yield from ((f"sum{number}", store.step) for number, store in self.sums())
        yield from ((f"total{n}", step.argument) for n, step in enumerate(self.kernel.steps) if isinstance(step, Total))

    def added(self) -> Iterator[str]:
        """Yield the lines that add a tile to the column sums."""
        mask = "rows" if self.is_whole else "mask"
        for name, step in self.accumulators():
            tile = f"tl.broadcast_to(v{step}, [{self.rows}, {self.block}])"
            yield f"{self.indent}{name} += tl.where({mask}, {tile}, 0.0)"

    def tail(self) -> Iterator[str]:
        """Yield the lines that store sums when all tiles of a part are done."""
        for number, _ in self.sums():
            dtype = DTYPES[self.kernel.outputs[number]]
            place = f"out{number} + part * {self.columns} + c"
            mask = "" if self.is_whole else ", columns"
            yield f"tl.store({place}, tl.sum(sum{number}, 0, keep_dims=True).to({dtype}){mask})"

    def place_of_columns(self, strides: Sequence[Size]) -> tuple[str, str]:
        """Return the offset and the mask of a store of one element per column."""
        _, by_column = self._offsets(strides)
        return by_column or "c", "" if self.is_whole else "columns"

    def access(self, strides: Sequence[Size]) -> tuple[str, str]:
        """Return the offset and the mask of an access; an offset of 0 is empty."""
        by_row, by_column = self._offsets(strides)
        if not by_row:
            return by_column, "" if self.is_whole or not by_column else "columns"
        if not by_column:
            return by_row, "rows"
        return f"{by_row} + {by_column}", "rows" if self.is_whole else "mask"

    def counter(self, loop: int) -> str:
        """Return a loop's counter."""
        return _counter(self.kernel, self.access, loop)

    def place(self, strides: Sequence[Size]) -> tuple[str, str]:
        """Return the offset and the mask of a store; without an offset, it stores the scalar of the only row."""
        by_row, by_column = self._offsets(strides)
        by_row = by_row or "r"  # of the only row, which is masked
        if not by_column:
            return by_row, "rows"
        return f"{by_row} + {by_column}", "rows" if self.is_whole else "mask"

    def _offsets(self, strides: Sequence[Size]) -> tuple[str, str]:
        outer, inner = strides[: -self.kernel.columns], strides[-self.kernel.columns :]
        by_row = _offset(terms(self.kernel.row_loops, outer), "r")
        return by_row, _offset(terms(self.kernel.column_loops, inner), "c")


@dataclass(frozen=True)
class LongRows(Rows):
    """Rows that no program can hold: it walks along one, block by block, once for each reduction of a reduction.

    Attributes:
        is_rest: False of the whole blocks of a row, True of the last one, which is masked.
    """

    is_rest: bool = False

    @property
    def block(self) -> int:
        """Columns of a tile."""
        return _LONG_BLOCK

    @property
    def blocks(self) -> int:
        """Tiles side by side."""
        return 1

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 1

    @property
    def num_warps(self) -> int:
        """Warps of each program."""
        return 16

    @property
    def is_whole(self) -> bool:
        """True if all columns of a tile are columns of the rows."""
        return not self.is_rest

    def head(self) -> Iterator[str]:
        """Yield the lines before the steps."""
        yield f"r = {_program(self.kernel)} + tl.arange(0, 1)[:, None]"
        yield f"rows = r < {written_size(self.kernel.row_count)}"

    def walks(self) -> Iterator[LongRows]:
        """Yield the loops along a row: one over its whole blocks, and one over the rest, if there is any."""
        yield self
        if self.columns % self.block:
            yield LongRows(self.kernel, is_rest=True)

    def walk(self) -> Iterator[str]:
        """Yield the head of a loop."""
        whole = self.columns // self.block * self.block
        yield f"for first in range({f'{whole}, {self.columns}' if self.is_rest else f'0, {whole}'}, {self.block}):"
        yield f"    c = first + {self.block_columns()}"
        if self.is_rest:
            yield f"    columns = c < {self.columns}"
            yield "    mask = rows & columns"


def _counter(kernel: Kernel, access: Callable[[Sequence[Size]], tuple[str, str]], loop: int) -> str:
    offset, _ = access([Size(int(other == loop)) for other in range(len(kernel.loops))])
    return f"({offset})"


def _is_wide(kernel: Kernel) -> bool:
    """Check whether offsets may exceed 32 bits."""
    loads = [step for step in kernel.steps if isinstance(step, Load)]
    if kernel.count.symbols or any(size.symbols for load in loads for size in (load.offset, *load.strides)):
        return True
    reach = (sum(n.factor * s.factor for n, s in zip(kernel.loops, load.strides, strict=True)) for load in loads)
    last = max((end + load.offset.factor for end, load in zip(reach, loads, strict=True)), default=0)
    return max(kernel.count.factor, last) >= 2**31


def _is_spread(kernel: Kernel) -> bool:
    """Check whether the offsets of the columns of one row may exceed 32 bits; with a symbol they are of 64 anyway."""
    far = [load.strides[-kernel.columns :] for load in kernel.steps if isinstance(load, Load)]
    reach = (sum(n.factor * s.factor for n, s in zip(kernel.column_loops, strides, strict=True)) for strides in far)
    return max(reach, default=0) >= 2**31


def _program(kernel: Kernel) -> str:
    return "tl.program_id(0).to(tl.int64)" if _is_wide(kernel) else "tl.program_id(0)"


def written_size(size: Size) -> str:
    """Return a size as an expression."""
    factors = [*([str(size.factor)] if size.factor != 1 or not size.symbols else []), *(f"s{s}" for s in size.symbols)]
    return factors[0] if len(factors) == 1 else f"({' * '.join(factors)})"


def _offset(found: Sequence[Term], index: str) -> str:
    """Terms of an index as an expression."""
    written = []
    for term in found:
        text = index if term.divisor == Size() else f"{index} // {written_size(term.divisor)}"
        if term.modulus is not None:
            text = f"{text} % {written_size(term.modulus)}"
        written.append(text if term.stride == Size() else f"({text}) * {written_size(term.stride)}")
    return " + ".join(written)
