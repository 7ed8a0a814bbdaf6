"""Runs the Triton source of fused operators on the CPU, in Triton's interpreter.

`interpret(op, inputs)` gives the outputs. One process serves all calls of a test session, as Triton is asked for its
interpreter by the environment, before a kernel is decorated. Three things of the interpreter are replaced there: it
truncates where float32 becomes bfloat16, it confuses bfloat16's bits with numbers in other casts, and it has no
libdevice. Functions of libdevice are computed by torch in float64 and rounded once, which is nearer to the truth than a
device is. It sees no alignment, no vectors, no races.

Memory around each tensor is filled: a read beyond an input gives NaN (or an odd number), a write beyond an output and
an element that is not written are errors.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

GUARD = 8192
"""Elements before and behind each tensor: more than a block that no mask bounds."""

DTYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
"""By ONNX's numbers."""


class InterpreterFailedError(Exception):
    """A kernel cannot be interpreted, or accesses memory out of bounds; the message is the process's."""


def interpret(op: Any, inputs: Sequence[torch.Tensor | np.ndarray[Any, Any]]) -> list[torch.Tensor]:
    """Run an operator's kernel on the CPU.

    Args:
        op: a FusedOp, whose source passes the check that it passes before it is compiled.
        inputs: contiguous, of its types.

    Returns:
        Its outputs.
    """
    from ort_dynamo.runtime.kernels.kernel_source import checked_source

    tensors = [one if isinstance(one, torch.Tensor) else torch.from_numpy(one) for one in inputs]
    assert [one.dtype for one in tensors] == [DTYPES[dtype] for dtype in op.inputs]
    assert all(one.is_contiguous() for one in tensors)
    symbols = tuple(int(tensors[i]) if i in op.numbers else tensors[i].shape[axis] for i, axis in op.symbols)
    outputs = [([size.value(symbols) for size in one.shape], DTYPES[one.dtype]) for one in op.outputs]
    text = checked_source(op.source, op.name).text
    return _asked(text, op.name, tensors, outputs, symbols, op.programs(symbols))


def _asked(*request: Any) -> Any:
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump(request, process.stdin)
        process.stdin.flush()
        answer = pickle.load(process.stdout)
    except (BrokenPipeError, EOFError) as error:
        _process.cache_clear()
        raise InterpreterFailedError(f"the interpreter ended with status {process.wait()}") from error
    if isinstance(answer, str):
        raise InterpreterFailedError(answer)
    return answer


@functools.cache
def _process() -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-W", "ignore", str(Path(__file__))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# -- in the process --------------------------------------------------------------------------------------------------


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _patch_casts()
    _keep_assertions()
    with tempfile.TemporaryDirectory() as folder:
        while True:
            try:
                request = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                answer: Any = _run(_kernel(Path(folder), *request[:2]), *request[2:])
            except Exception:
                answer = traceback.format_exc()
            pickle.dump(answer, answers)
            answers.flush()


@functools.cache
def _kernel(folder: Path, text: str, name: str) -> Any:
    path = folder / f"{len(os.listdir(folder))}.py"
    path.write_text(text, encoding="utf-8")
    module: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(text, str(path), "exec"), module)
    module["libdevice"] = Libdevice()
    return module[name]


def _run(
    kernel: Any,
    inputs: list[torch.Tensor],
    outputs: list[tuple[list[int], torch.dtype]],
    symbols: tuple[int, ...],
    programs: int,
) -> list[torch.Tensor]:
    read = [_guarded(one.shape, one.dtype, 0) for one in inputs]
    for one, (_, middle) in zip(inputs, read, strict=True):
        middle.copy_(one)
    results = []
    for fill in (0, 1):  # elements that differ between the runs are not written
        written = [_guarded(shape, dtype, fill) for shape, dtype in outputs]
        fresh = [_guarded(shape, dtype, fill) for shape, dtype in outputs]
        if programs:
            arguments = [middle for _, middle in (*read, *written)]
            kernel[(programs,)](*arguments, *map(_int64, symbols))
        for index, ((whole, _), (before, _)) in enumerate(zip(written, fresh, strict=True)):
            for guard in (slice(GUARD), slice(len(whole) - GUARD, None)):
                if not _same(whole[guard], before[guard]):
                    raise AssertionError(f"output {index} is written beyond its end")
        results.append([middle for _, middle in written])
    for index, (first, second) in enumerate(zip(*results, strict=True)):
        if not _same(first, second):
            raise AssertionError(f"output {index} is not written everywhere, or depends on its earlier content")
    return [one.clone() for one in results[0]]


def _guarded(shape: Sequence[int], dtype: torch.dtype, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A filled vector, and the tensor in the middle of it."""
    number = int(np.prod(shape, dtype=np.int64))
    if dtype == torch.bool:
        value: Any = bool(fill)
    elif dtype.is_floating_point:
        value = -77.0 if fill else float("nan")
    else:
        value = 77 + fill
    whole = torch.full((number + 2 * GUARD,), value, dtype=dtype)
    return whole, whole[GUARD : GUARD + number].view(shape)


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first, second) or torch.allclose(first.double(), second.double(), 0, 0, equal_nan=True)


def _int64(value: int) -> Any:
    """A parameter of type int64 for any value; the interpreter takes a small one for an int32."""
    import triton.language as tl

    return tl.tensor(_handle(np.array([value], np.int64), tl.int64), tl.int64)


def _handle(data: np.ndarray[Any, Any], dtype: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(data, dtype)


def _keep_assertions() -> None:
    from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

    interpreter_builder.options = InterpreterOptions(debug=True, sanitize_overflow=False)


def _patch_casts() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    plain = InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, to: Any) -> Any:
        before, after = source.dtype.scalar, to.scalar
        if before == after or tl.bfloat16 not in (before, after):
            return plain(self, source, to)
        if before == tl.bfloat16:
            bits = torch.from_numpy(np.ascontiguousarray(source.data).view(np.int16))
            wide = _handle(bits.view(torch.bfloat16).float().numpy().reshape(source.data.shape), tl.float32)
            return wide if after == tl.float32 else plain(self, wide, to)
        numbers = torch.from_numpy(np.ascontiguousarray(source.data).astype(np.float32))
        bits = numbers.to(torch.bfloat16).view(torch.int16)
        return _handle(bits.numpy().view(np.uint16).reshape(source.data.shape), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast


class Libdevice:
    """Libdevice, as far as `FUNCTIONS` goes."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in FUNCTIONS:
            raise AttributeError(f"the interpreter's libdevice has no {name}")
        return functools.partial(_elementwise, FUNCTIONS[name])


def _elementwise(function: Callable[..., torch.Tensor], *arguments: Any) -> Any:
    import triton.language as tl

    tensors = [one for one in arguments if isinstance(one, tl.tensor)]
    [dtype] = {one.dtype.scalar for one in tensors}
    if dtype not in (tl.float32, tl.float64):
        raise TypeError(f"libdevice has no function of {dtype}")
    given = [torch.from_numpy(np.asarray(_data(one), np.float64)) for one in arguments]
    found = function(*given).numpy()
    data = found.astype(np.float32 if dtype == tl.float32 else np.float64)
    shape = max((one.shape for one in tensors), key=len)
    kind = tl.block_type(dtype, [*map(int, shape)]) if shape else dtype
    return tl.tensor(_handle(data, dtype), kind)


def _data(argument: Any) -> Any:
    return argument.handle.data if hasattr(argument, "handle") else getattr(argument, "value", argument)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh")},
    **{name: getattr(torch, name) for name in ("ceil", "copysign", "cos", "cosh", "erf", "erfc", "erfinv", "exp")},
    **{name: getattr(torch, name) for name in ("exp2", "expm1", "floor", "fmod", "hypot", "lgamma", "log", "log10")},
    **{name: getattr(torch, name) for name in ("log1p", "log2", "pow", "rsqrt", "sin", "sinh", "sqrt", "tan")},
    **{name: getattr(torch, name) for name in ("tanh", "trunc")},
    "div_rn": torch.div,
    "fma": lambda x, y, z: x * y + z,
    "nearbyint": torch.round,
    "rint": torch.round,
    "rsqrt_rn": torch.rsqrt,
    "sqrt_rn": torch.sqrt,
}
"""Name -> the same of float64."""


if __name__ == "__main__":
    _serve()
