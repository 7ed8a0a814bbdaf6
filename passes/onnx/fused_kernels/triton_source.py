"""Prints kernels in Triton's language, and says how they are launched. Triton itself is not needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.fused_op import FusedOp, FusedOutput, Size
from ort_dynamo.passes.onnx.fused_kernels.kernel import (
    WIDE,
    Apply,
    ColumnSum,
    Constant,
    Counter,
    Kernel,
    Load,
    Reduce,
    Step,
    Store,
    Term,
    product,
    terms,
)

__all__ = ["DTYPES", "MOST_COLUMNS", "fused_op"]

MOST_COLUMNS = 16384
"""The longest row that one program holds in registers."""

_BLOCK = 64
"""Columns of a tile that need not be whole rows."""

_ELEMENTS = 1024
"""Elements of a program; 8 a thread, which load 16 bytes of a half type at once."""

_HEAD = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def {name}({parameters}):
"""

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

_FUNCTIONS: Mapping[str, str] = {
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "and": "{0} & {1}",
    "ceil": "libdevice.ceil({0})",
    "cos": "libdevice.cos({0})",
    "eq": "{0} == {1}",
    "erf": "libdevice.erf({0})",
    "exp": "libdevice.exp({0})",
    "floor": "libdevice.floor({0})",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "isnan": "{0} != {0}",
    "le": "{0} <= {1}",
    "log": "libdevice.log({0})",
    "log1p": "libdevice.log1p({0})",
    "lt": "{0} < {1}",
    "max": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "min": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "not": "{0} == 0",
    "or": "{0} | {1}",
    "round": "libdevice.rint({0})",
    "sin": "libdevice.sin({0})",
    "sub": "{0} - {1}",
    "tanh": "libdevice.tanh({0})",
    "where": "tl.where({0}, {1}, {2})",
    "xor": "{0} ^ {1}",
}
_FLOAT_FUNCTIONS: Mapping[tuple[str, ir.DataType], str] = {
    ("div", ir.DataType.FLOAT): "tl.div_rn({0}, {1})",  # "/" is off by up to 2 units in the last place
    ("div", ir.DataType.DOUBLE): "{0} / {1}",
    ("sqrt", ir.DataType.FLOAT): "tl.sqrt_rn({0})",
    ("sqrt", ir.DataType.DOUBLE): "tl.sqrt({0})",
}
_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})


def fused_op(kernel: Kernel, name: str) -> FusedOp:
    """Print a kernel, and join it with what a session has to know of it.

    Args:
        kernel: with element types of DTYPES; columns have constant sizes and at most MOST_COLUMNS points.
        name: of the operator and of the function.
    """
    space = _Rows(kernel) if kernel.columns else _Flat(kernel)
    parameters = [f"in{number}" for number in range(len(kernel.inputs))]
    parameters += [f"out{number}" for number in range(len(kernel.outputs))]
    parameters += [f"s{number}" for number in range(len(kernel.symbols))]
    lines = [*space.head(), *_steps(kernel, space), *_stores(kernel, space), *space.added(), *space.tail()]
    source = _HEAD.format(name=name, parameters=", ".join(parameters)) + "".join(f"    {line}\n" for line in lines)
    outputs = tuple(
        FusedOutput(dtype.value, store.shape) for dtype, store in zip(kernel.outputs, kernel.stores, strict=True)
    )
    inputs = tuple(dtype.value for dtype in kernel.inputs)
    return FusedOp(name, inputs, outputs, kernel.symbols, space.count, space.per_program, source, space.num_warps)


def _is_wide(kernel: Kernel) -> bool:
    """Whether offsets may exceed 32 bits."""
    return bool(kernel.count.symbols) or kernel.count.factor >= 2**31


class _Flat:
    """All loops as one index."""

    def __init__(self, kernel: Kernel) -> None:
        self.count, self.per_program, self.num_warps = kernel.count, _ELEMENTS, 4
        self._kernel = kernel

    indent = ""

    def head(self) -> Iterator[str]:
        yield f"i = {_program(self._kernel)} * {self.per_program} + tl.arange(0, {self.per_program})"
        yield f"mask = i < {_size(self.count)}"

    def access(self, strides: Sequence[Size]) -> tuple[str, str]:
        """The offset and the mask of an access; no offset where it is 0."""
        offset = _offset(terms(self._kernel.loops, strides), "i")
        return offset, "mask" if offset else ""

    def counter(self, loop: int) -> str:
        """A loop's counter."""
        return _counter(self._kernel, self.access, loop)

    def place(self, strides: Sequence[Size]) -> tuple[str, str]:
        """Likewise of a store; one that has no offset stores one element, at the only point."""
        offset, _ = self.access(strides)
        return offset or "i", "mask"

    def added(self) -> Iterator[str]:
        return iter(())

    tail = added


@dataclass(frozen=True)
class _Rows:
    """Tiles of rows: whole rows where these are reduced, else blocks of their columns.

    A program computes one tile; with column sums, the tiles of one part of the rows, one after another.
    """

    kernel: Kernel

    @property
    def columns(self) -> int:
        return product(self.kernel.column_loops).factor

    @property
    def block(self) -> int:
        """Columns of a tile."""
        whole = 1 << (self.columns - 1).bit_length()
        return whole if self.kernel.has_row_numbers else min(whole, _BLOCK)

    @property
    def blocks(self) -> int:
        """Tiles side by side."""
        return -(-self.columns // self.block)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        most = 1 << (self.kernel.part - 1).bit_length() if self.kernel.part else _ELEMENTS
        return min(most, max(1, _ELEMENTS // self.block))

    @property
    def count(self) -> Size:
        return product(self.kernel.row_loops) * Size(self.blocks)

    @property
    def per_program(self) -> int:
        return self.kernel.part or self.rows

    @property
    def num_warps(self) -> int:
        return max(1, min(16, self.block * self.rows // 512))

    @property
    def is_whole(self) -> bool:
        """Whether all columns of a tile are columns of the rows."""
        return self.columns % self.block == 0

    def head(self) -> Iterator[str]:
        program, rows = _program(self.kernel), f"tl.arange(0, {self.rows})[:, None]"
        columns = f"tl.arange(0, {self.block})[None, :]"
        if self.blocks > 1:
            yield f"p = {program}"
            program, columns = f"(p // {self.blocks})", f"p % {self.blocks} * {self.block} + {columns}"
        yield f"c = {columns}"
        if not self.is_whole:
            yield f"columns = c < {self.columns}"
        if not self.kernel.part:
            yield f"r = {program} * {self.rows} + {rows}"
            yield f"rows = r < {_size(product(self.kernel.row_loops))}"
        else:
            yield f"part = {program}"
            for number, store in self.sums():
                dtype = DTYPES[self.kernel.steps[store.step].dtype]
                yield f"sum{number} = tl.zeros([{self.rows}, {self.block}], {dtype})"
            yield f"for first in range(0, {self.kernel.part}, {self.rows}):"
            yield f"    within = first + {rows}"
            yield f"    r = part * {self.kernel.part} + within"
            yield f"    rows = within < {self.kernel.part}"
        if not self.is_whole:
            yield f"{self.indent}mask = rows & columns"

    @property
    def indent(self) -> str:
        return "    " if self.kernel.part else ""

    def sums(self) -> Iterator[tuple[int, ColumnSum]]:
        """The column sums, by the numbers of their outputs."""
        for number, store in enumerate(self.kernel.stores):
            if isinstance(store, ColumnSum):
                yield number, store

    def added(self) -> Iterator[str]:
        """What a tile adds to the column sums."""
        mask = "rows" if self.is_whole else "mask"
        for number, store in self.sums():
            tile = f"tl.broadcast_to(v{store.step}, [{self.rows}, {self.block}])"
            yield f"{self.indent}sum{number} += tl.where({mask}, {tile}, 0.0)"

    def tail(self) -> Iterator[str]:
        """What is stored when all tiles of a part are done."""
        for number, _ in self.sums():
            dtype = DTYPES[self.kernel.outputs[number]]
            place = f"out{number} + part * {self.columns} + c"
            mask = "" if self.is_whole else ", columns"
            yield f"tl.store({place}, tl.sum(sum{number}, 0, keep_dims=True).to({dtype}){mask})"

    def access(self, strides: Sequence[Size]) -> tuple[str, str]:
        by_row, by_column = self._offsets(strides)
        if not by_row:
            return by_column, "" if self.is_whole or not by_column else "columns"
        if not by_column:
            return by_row, "rows"
        return f"{by_row} + {by_column}", "rows" if self.is_whole else "mask"

    def counter(self, loop: int) -> str:
        return _counter(self.kernel, self.access, loop)

    def place(self, strides: Sequence[Size]) -> tuple[str, str]:
        by_row, by_column = self._offsets(strides)
        by_row = by_row or "r"  # of the only row, which is masked
        if not by_column:
            return by_row, "rows"
        return f"{by_row} + {by_column}", "rows" if self.is_whole else "mask"

    def _offsets(self, strides: Sequence[Size]) -> tuple[str, str]:
        outer, inner = strides[: -self.kernel.columns], strides[-self.kernel.columns :]
        by_row = _offset(terms(self.kernel.row_loops, outer), "r")
        return by_row, _offset(terms(self.kernel.column_loops, inner), "c")


def _counter(kernel: Kernel, access: Callable[[Sequence[Size]], tuple[str, str]], loop: int) -> str:
    offset, _ = access([Size(int(other == loop)) for other in range(len(kernel.loops))])
    return f"({offset})"


def _program(kernel: Kernel) -> str:
    return "tl.program_id(0).to(tl.int64)" if _is_wide(kernel) else "tl.program_id(0)"


def _size(size: Size) -> str:
    """A size as an expression."""
    factors = [*([str(size.factor)] if size.factor != 1 or not size.symbols else []), *(f"s{s}" for s in size.symbols)]
    return factors[0] if len(factors) == 1 else f"({' * '.join(factors)})"


def _offset(found: Sequence[Term], index: str) -> str:
    """Terms of an index as an expression."""
    written = []
    for term in found:
        text = index if term.divisor == Size() else f"{index} // {_size(term.divisor)}"
        if term.modulus is not None:
            text = f"{text} % {_size(term.modulus)}"
        written.append(text if term.stride == Size() else f"({text}) * {_size(term.stride)}")
    return " + ".join(written)


def _literal(step: Constant) -> str:
    """A number that keeps its type: a literal of Python's would be float32."""
    wide = WIDE.get(step.dtype, step.dtype)
    if isinstance(step.value, float) and not math.isfinite(step.value):
        return f'tl.full([], float("{step.value}"), {DTYPES[wide]})'
    value = int(step.value) if wide in _INTEGERS or wide == ir.DataType.BOOL else float(step.value)
    return f"tl.full([], {value!r}, {DTYPES[wide]})"


def _steps(kernel: Kernel, space: _Flat | _Rows) -> Iterator[str]:
    for number, step in enumerate(kernel.steps):
        yield f"{space.indent}v{number} = {_written(step, space)}"


def _written(step: Step, space: _Flat | _Rows) -> str:
    match step:
        case Load():
            offset, mask = space.access(step.strides)
            first = _size(step.offset) if step.offset.factor else ""
            place = " + ".join(filter(None, (f"in{step.input}", first, offset)))
            masks = [*([mask] if mask else []), *(f"({space.counter(loop)} == {number})" for loop, number in step.only)]
            if step.only and not offset:
                place = f"{place} + {space.counter(step.only[0][0])} * 0"  # a mask is of no wider shape than pointers
            loaded = f"tl.load({', '.join(filter(None, (place, ' & '.join(masks))))})"
            return f"{loaded}.to({DTYPES[WIDE[step.dtype]]})" if step.dtype in WIDE else loaded
        case Counter():
            offset, _ = space.access(step.strides)
            return f"({offset}).to(tl.int64)" if offset else "tl.full([], 0, tl.int64)"
        case Constant():
            return _literal(step)
        case Reduce():
            assert isinstance(space, _Rows)
            return _reduced(step, space)
        case Apply():
            return _applied(step)


def _applied(step: Apply) -> str:
    given = [f"v{argument}" for argument in step.arguments]
    narrow = f".to({DTYPES[step.dtype]}).to({DTYPES[WIDE[step.dtype]]})" if step.dtype in WIDE else ""
    if step.function == "convert":
        if step.dtype == ir.DataType.BOOL:
            return f"{given[0]} != 0"
        return f"{given[0]}{narrow or f'.to({DTYPES[step.dtype]})'}"
    wide = WIDE.get(step.dtype, step.dtype)
    if step.function in ("max", "min") and wide in _INTEGERS:
        return f"tl.{step.function}imum({', '.join(given)})"
    form = _FLOAT_FUNCTIONS.get((step.function, wide)) or _FUNCTIONS[step.function]
    text = form.format(*given)
    return f"({text}){narrow}" if narrow else text


def _reduced(step: Reduce, space: _Rows) -> str:
    """A row's sum, or its maximum, which Triton's own would take without NaN."""
    x = f"tl.broadcast_to(v{step.argument}, [{space.rows}, {space.block}])"
    if step.function == "sum":
        return f"tl.sum({_in_columns(x, '0.0', space)}, 1, keep_dims=True)"
    is_nan = _in_columns(f"({x} != {x}).to(tl.int32)", "0", space)
    finite = _in_columns(x, "-float('inf')", space)
    return f'tl.where(tl.max({is_nan}, 1, keep_dims=True) > 0, float("nan"), tl.max({finite}, 1, keep_dims=True))'


def _in_columns(text: str, neutral: str, space: _Rows) -> str:
    return text if space.is_whole else f"tl.where(columns, {text}, {neutral})"


def _stores(kernel: Kernel, space: _Flat | _Rows) -> Iterator[str]:
    for number, (store, dtype) in enumerate(zip(kernel.stores, kernel.outputs, strict=True)):
        if isinstance(store, Store):
            offset, mask = space.place(store.strides)
            yield f"{space.indent}tl.store(out{number} + {offset}, v{store.step}.to({DTYPES[dtype]}), {mask})"
