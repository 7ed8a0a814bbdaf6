"""Print kernels in Triton's language, with their launch parameters. Triton itself is not needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from ort_dynamo.graph.fused_op import FusedOp, FusedOutput
from ort_dynamo.passes.onnx.fused_kernels.kernel import (
    WIDE,
    Apply,
    Constant,
    Counter,
    HostNumber,
    Kernel,
    Load,
    Reduce,
    Step,
    Store,
    Total,
    read_by,
)
from ort_dynamo.passes.onnx.fused_kernels.triton_spaces import DTYPES, Flat, LongRows, Rows, written_size

__all__ = ["fused_op"]

_HEAD = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def {name}({parameters}):
"""

_HALF_ERFC = (
    *(-1.6279079914093018, -0.9184297323226929, -0.14838461577892303, 0.027927041053771973, -0.00018771880422718823),
    *(-0.0020862428937107325, 0.000791564118117094, -0.00015459339192602783, 1.6264622900052927e-05),
    -7.255965215335891e-07,
)
"""Coefficients of x, x², … of a polynomial p with erfc(x) = 2^p(x) for x in 0 to infinity.

It is a minimax fit on 0 to 4.6. erfc(x) / 2 in float32 is off by 4e-8, half a unit in the last place of 1, and there by
2e-5 of itself at most. Beyond, p falls to minus infinity, without a NaN.
"""


def _polynomial(coefficients: Sequence[float], x: str) -> str:
    """Write the polynomial of coefficients of x, x², … by Horner's rule."""
    text = repr(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        text = f"tl.fma({text}, {x}, {coefficient!r})"
    return f"{text} * {x}"


_FUNCTIONS: Mapping[str, str] = {
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "and": "{0} & {1}",
    "bitand": "{0} & {1}",
    "bitor": "{0} | {1}",
    "bitxor": "{0} ^ {1}",
    "ceil": "libdevice.ceil({0})",
    "cos": "libdevice.cos({0})",
    "eq": "{0} == {1}",
    "erf": "libdevice.erf({0})",
    "exp": "libdevice.exp({0})",
    "floor": "libdevice.floor({0})",
    "ge": "{0} >= {1}",
    "gt": "{0} > {1}",
    "half_erfc": f"tl.exp2({_polynomial(_HALF_ERFC, '{0}')}) * 0.5",
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
    "stop": "{1}",
    "sub": "{0} - {1}",
    "tanh": "libdevice.tanh({0})",
    "where": "tl.where({0}, {1}, {2})",
    "xor": "{0} ^ {1}",
}
_FLOAT_FUNCTIONS: Mapping[tuple[str, ir.DataType], str] = {
    ("div", ir.DataType.FLOAT): "tl.div_rn({0}, {1})",  # "/" is off by up to 2 units in the last place
    ("div", ir.DataType.DOUBLE): "{0} / {1}",
    **{("neg", dtype): "{0} * -1.0" for dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)},  # "-" is 0 - x in Triton 3.6
    ("sqrt", ir.DataType.FLOAT): "tl.sqrt_rn({0})",
    ("sqrt", ir.DataType.DOUBLE): "tl.sqrt({0})",
}
_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})


def fused_op(kernel: Kernel, name: str) -> FusedOp:
    """Print a kernel, with the facts that a session needs.

    Args:
        kernel: the kernel; its element types are in DTYPES, its columns have constant sizes, and reduced ones at most
            MOST_LONG points.
        name: the name of the operator and of the function.
    """
    space = LongRows(kernel) if kernel.is_long else Rows(kernel) if kernel.columns else Flat(kernel)
    parameters = [f"in{number}" for number in range(len(kernel.inputs))]
    parameters += [f"out{number}" for number in range(len(kernel.outputs))]
    parameters += [f"s{number}" for number in range(len(kernel.symbols))]
    if isinstance(space, LongRows):
        lines = [*space.head(), *_walks(kernel, space)]
    else:
        lines = [*space.head(), *_steps(kernel, space), *_stores(kernel, space), *space.added(), *space.tail()]
        lines += _late(kernel, space) if isinstance(space, Rows) else ()
    source = _HEAD.format(name=name, parameters=", ".join(parameters)) + "".join(f"    {line}\n" for line in lines)
    outputs = tuple(
        FusedOutput(dtype.value, store.shape) for dtype, store in zip(kernel.outputs, kernel.stores, strict=True)
    )
    inputs = tuple(dtype.value for dtype in kernel.inputs)
    return FusedOp(name, inputs, outputs, kernel.symbols, space.count, space.per_program, source, space.num_warps)


def _literal(step: Constant) -> str:
    """Write a scalar that keeps its dtype; a Python literal would be float32."""
    wide = WIDE.get(step.dtype, step.dtype)
    if isinstance(step.value, float) and not math.isfinite(step.value):
        return f'tl.full([], float("{step.value}"), {DTYPES[wide]})'
    value = int(step.value) if wide in _INTEGERS or wide == ir.DataType.BOOL else float(step.value)
    if value == 0 and math.copysign(1, value) < 0:
        return f"tl.full([], 0.0, {DTYPES[wide]}) * -1.0"  # Triton 3.6 fills with 0 what is equal to 0
    return f"tl.full([], {value!r}, {DTYPES[wide]})"


def _steps(kernel: Kernel, space: Flat | Rows) -> Iterator[str]:
    for number, step in enumerate(kernel.steps):
        if kernel.late[number]:
            continue
        if isinstance(step, Apply) and step.function == "stop":
            # Beyond the mask the elements are undefined.
            yield f'{space.indent}tl.device_assert(v{step.arguments[0]} == 0, "an index is out of range", mask)'
        yield f"{space.indent}v{number} = {_written(step, space)}"


def _written(step: Step, space: Flat | Rows) -> str:
    match step:
        case Load():
            offset, mask = space.access(step.strides)
            first = written_size(step.offset) if step.offset.factor else ""
            place = " + ".join(filter(None, (f"in{step.input}", first, offset)))
            masks = [*([mask] if mask else []), *(f"({space.counter(loop)} == {number})" for loop, number in step.only)]
            for index, stride, count in step.places:
                place += f" + v{index} * {written_size(stride)}"
                masks.append(f"(v{index} >= 0) & (v{index} < {written_size(count)})")
            if step.only and not offset:
                place = f"{place} + {space.counter(step.only[0][0])} * 0"  # a mask is of no wider shape than pointers
            other = "0" if step.places else ""  # for an index out of bounds; other masked elements are never read
            loaded = f"tl.load({', '.join(filter(None, (place, ' & '.join(masks), other)))})"
            return f"{loaded}.to({DTYPES[WIDE[step.dtype]]})" if step.dtype in WIDE else loaded
        case Counter():
            offset, _ = space.access(step.strides)
            return f"({offset}).to(tl.int64)" if offset else "tl.full([], 0, tl.int64)"
        case HostNumber():
            return written_size(step.value)
        case Constant():
            return _literal(step)
        case Reduce():
            assert isinstance(space, Rows)
            return _reduced(step, space)
        case Total():
            raise AssertionError("a total is written when all rows are added")
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


def _reduced(step: Reduce, space: Rows) -> str:
    """Return a row's sum, or its maximum, which Triton's own would take without NaN."""
    x = f"tl.broadcast_to(v{step.argument}, [{space.rows}, {space.block}])"
    if step.function == "sum":
        return f"tl.sum({_in_columns(x, '0.0', space)}, 1, keep_dims=True)"
    is_nan = _in_columns(f"({x} != {x}).to(tl.int32)", "0", space)
    return _maximum(is_nan, _in_columns(x, "-float('inf')", space))


def _maximum(is_nan: str, finite: str) -> str:
    """Return the maximum of a row, or NaN where it has one."""
    return f'tl.where(tl.max({is_nan}, 1, keep_dims=True) > 0, float("nan"), tl.max({finite}, 1, keep_dims=True))'


def _in_columns(text: str, neutral: str, space: Rows) -> str:
    return text if space.is_whole else f"tl.where(columns, {text}, {neutral})"


def _stores(kernel: Kernel, space: Flat | Rows) -> Iterator[str]:
    for number, store in enumerate(kernel.stores):
        if isinstance(store, Store) and not kernel.late[store.step]:
            yield f"{space.indent}{_stored(kernel, space, number, store)}"


def _stored(kernel: Kernel, space: Flat | Rows, number: int, store: Store) -> str:
    offset, mask = space.place(store.strides)
    return f"tl.store(out{number} + {offset}, v{store.step}.to({DTYPES[kernel.outputs[number]]}), {mask})"


def _late(kernel: Kernel, space: Rows) -> Iterator[str]:
    """Yield the lines that compute and store values that depend on totals, when all rows are added."""
    needed, left = set[int](), [number for number, is_late in enumerate(kernel.late) if is_late]
    while left:
        number = left.pop()
        if number not in needed:
            needed.add(number)
            left += () if isinstance(kernel.steps[number], Total) else read_by(kernel.steps[number])
    for number in sorted(needed):
        step = kernel.steps[number]
        total = f"tl.sum(total{number}, 0, keep_dims=True)"
        yield f"v{number} = {total if isinstance(step, Total) else _written(step, space)}"
    for number, store in enumerate(kernel.stores):
        if isinstance(store, Store) and kernel.late[store.step]:
            offset, mask = space.place_of_columns(store.strides)
            value = f"v{store.step}.to({DTYPES[kernel.outputs[number]]})"
            yield f"tl.store({', '.join(filter(None, (f'out{number} + {offset}', value, mask)))})"


# -- rows that are walked along --------------------------------------------------------------------------------------


def _walks(kernel: Kernel, space: LongRows) -> Iterator[str]:
    """Write the body of a kernel of long rows: the scalars of a row, and loops over it that reduce, then store."""
    walk = _Walk(kernel)
    for level in range(max(walk.levels) + 1):
        found = {n: step for n, step in enumerate(kernel.steps) if isinstance(step, Reduce) and walk.levels[n] == level}
        if found:
            yield from (f"sum{n} = {_neutral(step, space)}" for n, step in found.items())
            for blocks in space.walks():
                yield from blocks.walk()
                yield from (f"    {line}" for line in walk.columns([step.argument for step in found.values()], blocks))
                yield from (f"    sum{n} = {_gathered(step, n, blocks)}" for n, step in found.items())
            yield from (f"v{n} = {_total(step, n)}" for n, step in found.items())
        yield from walk.numbers(level, space)
    stores = [(n, store) for n, store in enumerate(kernel.stores) if isinstance(store, Store)]
    wide = [(n, store) for n, store in stores if any(size.factor for size in store.strides[-kernel.columns :])]
    for blocks in space.walks() if wide else ():
        yield from blocks.walk()
        yield from (f"    {line}" for line in walk.columns([store.step for _, store in wide], blocks))
        yield from (f"    {_stored(kernel, blocks, n, store)}" for n, store in wide)
    yield from (_stored(kernel, space, n, store) for n, store in stores if (n, store) not in wide)


class _Walk:
    """The steps of a kernel that are one scalar per row, and the loops over the row that each step has to wait for."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.levels: list[int] = []
        self._is_wide: list[bool] = []
        for step in kernel.steps:
            read = read_by(step)
            self.levels.append(max((self.levels[n] for n in read), default=0) + isinstance(step, Reduce))
            own = isinstance(step, Load | Counter) and any(size.factor for size in step.strides[-kernel.columns :])
            only = isinstance(step, Load) and any(loop >= len(kernel.loops) - kernel.columns for loop, _ in step.only)
            self._is_wide.append(not isinstance(step, Reduce) and (own or only or any(self._is_wide[n] for n in read)))

    def numbers(self, level: int, space: LongRows) -> Iterator[str]:
        """Yield the steps with one scalar per row that can be computed right after `level` loops."""
        for number, step in enumerate(self._kernel.steps):
            if not self._is_wide[number] and self.levels[number] == level and not isinstance(step, Reduce):
                yield f"v{number} = {_written(step, space)}"

    def columns(self, wanted: Sequence[int], space: LongRows) -> Iterator[str]:
        """Yield the steps at a block of columns that these steps need, and they themselves."""
        needed, left = set[int](), [*wanted]
        while left:
            number = left.pop()
            if self._is_wide[number] and number not in needed:
                needed.add(number)
                left += read_by(self._kernel.steps[number])
        yield from (f"v{number} = {_written(self._kernel.steps[number], space)}" for number in sorted(needed))


def _neutral(step: Reduce, space: LongRows) -> str:
    value = "0.0" if step.function == "sum" else "-float('inf')"
    return f"tl.full([1, {space.block}], {value}, {DTYPES[step.dtype]})"


def _gathered(step: Reduce, number: int, space: LongRows) -> str:
    """Return the reduction of each column after one more block."""
    x = f"tl.broadcast_to(v{step.argument}, [1, {space.block}])"
    if step.function == "sum":
        return f"sum{number} + {_in_columns(x, '0.0', space)}"
    inside = _in_columns(x, "-float('inf')", space)
    return f"tl.maximum(sum{number}, {inside}, propagate_nan=tl.PropagateNan.ALL)"


def _total(step: Reduce, number: int) -> str:
    x = f"sum{number}"
    return f"tl.sum({x}, 1, keep_dims=True)" if step.function == "sum" else _maximum(f"({x} != {x}).to(tl.int32)", x)
