"""Writes the Python that takes torch's tensors through a session, without copying them."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ort_dynamo.graph.boundary import ValueSpec, copy_with_strides, inverse
from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.runtime import processes
from ort_dynamo.runtime.binding import Crossing, Run, crossing
from ort_dynamo.runtime.data_errors import is_of_the_program
from ort_dynamo.runtime.generated_code import generate_function
from ort_dynamo.runtime.processes import own_session
from ort_dynamo.torch_internals.dlpack import from_dlpack, to_dlpack

__all__ = ["OwnSession", "Stopped", "session_code"]


class Stopped(Exception):  # noqa: N818
    """ONNX Runtime stopped, with its message. Code that knows the origin of the graph turns it into an error."""


class OwnSession:
    """A session of this process: the first one, and in a forked child one that is opened at its first call.

    Attributes:
        again: gives the function that feeds the session, while the session is alive.

    Args:
        opened: opens the session.
        around: wraps the function that runs it.
    """

    def __init__(self, opened: Callable[[], Any], around: Callable[[Run], Run] | None = None) -> None:
        self._opened = opened
        self._around = around
        self.again: Callable[[], Callable[..., Any] | None] = lambda: None
        self.open()

    def open(self) -> None:
        """Open it in the calling process."""
        self.session: Any = own_session(self._opened)  # keeps the raw session alive
        run = crossing().run_of(self.session)
        self.run: Run = run if self._around is None else self._around(run)
        self.process: int = processes.current


def session_code(
    built: BuiltGraph,
    own: OwnSession,
    device: torch.device,
    options: Any,
    *,
    owned: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Callable[..., Any]:
    """Write the function that runs a graph on one value per input.

    With `owned`, results are torch's tensors, which ONNX Runtime fills. If only ONNX Runtime knows their sizes, `owned`
    copies its results. torch's out-of-memory errors are not caught.

    This is the function of a graph with a matrix, a transposed matrix and a bool as inputs and one output, for
    onnxruntime 1.31:

        def run(x0, x1, x2):
            if processes.current != own.process:
                own.open()
            feeds, fetches = vector(), vector()
            feeds.reserve(3)
            push = feeds.push_back
            push(to_dlpack(x0 if x0.is_contiguous() and not x0.is_neg() else fitted(x0)), False)
            x1 = x1.permute(1, 0)
            push(to_dlpack(x1 if x1.is_contiguous() and not x1.is_neg() else fitted(x1)), False)
            push(to_dlpack((x2 if x2.is_contiguous() and not x2.is_neg() else fitted(x2)).view(torch.uint8)), True)
            try:
                own.run(options, inputs, feeds, outputs, fetches, places)
            except Exception as error:
                if is_of_the_program(error):
                    raise
                cast = cast_to(specs, (x0, x1, x2))
                if cast is None:
                    raise Stopped(str(error)) from error
                return own.again()(*cast)
            return (from_dlpack(fetches.dlpack_at(0)),)
    """
    how = crossing()
    session = own.session
    taken, given = session.get_inputs(), session.get_outputs()
    names = [f"x{index}" for index in range(len(built.inputs))]
    read = [(name, spec) for name, spec in zip(names, built.inputs, strict=True) if spec.is_read]
    fed = [
        line
        for (name, spec), value in zip(read, taken, strict=True)
        for line in _feed(name, spec, how, may_be_empty=_may_be_empty(value))
    ]
    made = None if owned is None else _sizes(taken, given, read)
    if made is None:
        result = (
            "from_dlpack(fetches.dlpack_at({index}))"
            if owned is None
            else "owned(from_dlpack(fetches.dlpack_at({index})))"
        )
        fetched = [
            _fetch(result.format(index=index), spec, may_be_empty=_may_be_empty(value))
            for index, (spec, value) in enumerate(zip(built.outputs, given, strict=True))
        ]
    else:
        fetched = [_fetch(f"y{index}", spec, may_be_empty=False) for index, spec in enumerate(built.outputs)]
    lines = [
        f"def run({', '.join(names)}):",
        "    if processes.current != own.process:",  # in a forked child
        "        own.open()",
        "    feeds, fetches = vector(), vector()",
        f"    feeds.reserve({len(read)})",
        "    push = feeds.push_back",
        *(f"    {line}" for line in fed),
        *([] if made is None else (f"    {line}" for line in _to_fill(made, built.outputs, how))),
        "    try:",
        "        own.run(options, inputs, feeds, outputs, fetches, places)",
        *([] if owned is None else ["    except OutOfMemoryError:", "        raise"]),
        "    except Exception as error:",  # pybind exposes about ten unrelated exception classes
        "        if is_of_the_program(error):",
        "            raise",
        f"        cast = cast_to(specs, ({' '.join(f'{name},' for name in names)}))",
        "        if cast is None:",
        "            raise Stopped(str(error)) from error",
        "        return own.again()(*cast)",
        f"    return ({' '.join(f'{one},' for one in fetched)})",
    ]
    values = {
        "own": own,
        "vector": how.vector,
        "options": options,
        "inputs": [value.name for value in taken],
        "outputs": [value.name for value in given],
        "places": [how.place(device)] * len(given),
        "device": device,
        "owned": owned,
        "specs": built.inputs,
    }
    run = generate_function("run", lines, {**_COMMON, **values})
    own.again = weakref.ref(run)
    return run


def _may_be_empty(value: Any) -> bool:
    """Check whether a session's input or output may have no element."""
    return not all(isinstance(size, int) and size for size in value.shape)


def _feed(name: str, spec: ValueSpec, how: Crossing, *, may_be_empty: bool) -> Iterator[str]:
    """Yield the lines that hand one value to ONNX Runtime."""
    if spec.as_rows:
        fits = f"empty(({name}, 0), dtype={spec.dtype}, device=device)"
    elif spec.is_number:
        fits = f"tensor({name}, dtype={spec.dtype}, device='cpu')"  # the program may have set a default device
    else:
        if spec.order:
            yield f"{name} = {name}.permute({_spelled(spec.order)})"
        has_elements = f" and {name}.numel()" if may_be_empty else ""
        fits = f"{name} if {name}.is_contiguous() and not {name}.is_neg(){has_elements} else fitted({name})"
    yield _pushed("push", fits, spec, how)


def _pushed(push: str, tensor: str, spec: ValueSpec, how: Crossing) -> str:
    """Return the line that puts an expression's tensor into a vector of values."""
    if not how.bool_is_bytes:
        return f"{push}(to_dlpack({tensor}))"
    if spec.dtype is torch.bool:
        return f"{push}(to_dlpack(({tensor}).view(torch.uint8)), True)"
    return f"{push}(to_dlpack({tensor}), False)"  # given though it has a default: pybind takes longer to find that


def _sizes(taken: Sequence[Any], given: Sequence[Any], read: Sequence[tuple[str, ValueSpec]]) -> list[str] | None:
    """Give the sizes of each result, as expressions of the inputs; None where one is known only once it is computed."""
    known = {
        size: name if spec.is_number else f"{name}.shape[{axis}]"
        for value, (name, spec) in zip(taken, read, strict=True)
        for axis, size in enumerate(value.shape)
        if isinstance(size, str) and size.isascii() and size.isidentifier()
    }
    spelled = [[_size(size, known) for size in value.shape] for value in given]
    if any(size is None for sizes in spelled for size in sizes):
        return None
    return ["".join(f"{size}, " for size in sizes) for sizes in spelled]


_LONGEST = 1000
"""Characters of a size at most that is looked at."""

_HIGHEST = 8
"""The highest power."""

_SIGNS: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}


def _size(size: Any, known: Mapping[str, str]) -> str | None:
    """Return a size as Python source; None if it has more than sums, products, powers and floors of known names.

    A size may come from a cache entry. So it is not copied, but written anew from its syntax tree.
    """
    if isinstance(size, int):
        return str(size)
    if not isinstance(size, str) or not size.isascii() or len(size) > _LONGEST:
        return None
    try:
        return _expression(ast.parse(size, mode="eval").body, known)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of the parser
        return None


def _expression(node: ast.expr, known: Mapping[str, str]) -> str | None:
    """Write an expression; None if it has more than `_size` allows."""
    match node:
        case ast.Name():
            return known.get(node.id)
        case ast.Constant(value=value) if type(value) is int:
            return str(value)
        case ast.UnaryOp(op=ast.USub()):
            inner = _expression(node.operand, known)
            return None if inner is None else f"(-{inner})"
        case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=value)) if type(value) is int and 0 < value <= _HIGHEST:
            base = _expression(node.left, known)
            return None if base is None else f"({base} ** {value})"
        case ast.BinOp() if type(node.op) in _SIGNS:
            left, right = _expression(node.left, known), _expression(node.right, known)
            return None if left is None or right is None else f"({left} {_SIGNS[type(node.op)]} {right})"
    return None


def _to_fill(made: Sequence[str], specs: Sequence[ValueSpec], how: Crossing) -> Iterator[str]:
    """Yield the lines that hand ONNX Runtime memory of torch's for the results."""
    yield f"fetches.reserve({len(made)})"
    yield "give = fetches.push_back"
    for index, (sizes, spec) in enumerate(zip(made, specs, strict=True)):
        yield f"y{index} = empty(({sizes}), dtype={spec.dtype}, device=device)"
        yield _pushed("give", f"y{index}", spec, how)


def _fetch(tensor: str, spec: ValueSpec, *, may_be_empty: bool) -> str:
    """Return the expression that turns `tensor`, a result of ONNX Runtime, into the tensor that the spec describes."""
    if spec.dtype is torch.bool:
        tensor = f"as_bool({tensor})"
    if may_be_empty:
        tensor = f"contiguous_if_empty({tensor})"
    if spec.order:
        return f"{tensor}.permute({_spelled(inverse(spec.order))})"
    return f"copy_with_strides({tensor}, {spec.strides})" if spec.strides else tensor


def _spelled(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _fitted(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same elements in memory that ONNX Runtime can read directly."""
    tensor = tensor.contiguous()
    if not tensor.numel():
        tensor = tensor.new_empty(tensor.shape)  # contiguous to torch with any strides, not to ONNX Runtime
    return tensor.resolve_neg()  # DLPack hands over the memory and drops the bit that negates it


def _cast_to(specs: Sequence[ValueSpec], values: Sequence[Any]) -> list[Any] | None:
    """Give the values in the dtypes of their specs, or None if they have those.

    A kernel of torch may give another dtype than its fake tensor, which the model has. ONNX Runtime refuses that before
    it runs anything, so a call with the right dtypes never gets here.

    Args:
        specs: the specs of all inputs.
        values: the inputs, permuted as in their specs.
    """
    pairs = list(zip(specs, values, strict=True))
    if all(spec.is_number or value.dtype is spec.dtype for spec, value in pairs):
        return None
    return [
        value if spec.is_number else (value.permute(inverse(spec.order)) if spec.order else value).to(spec.dtype)
        for spec, value in pairs
    ]


def _as_bool(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.bool else tensor.view(torch.bool)


def _contiguous_if_empty(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.numel() else tensor.new_empty(tensor.shape)  # onnxruntime 1.32 gives it strides of 0


_COMMON: Mapping[str, Any] = {
    "OutOfMemoryError": torch.OutOfMemoryError,
    "Stopped": Stopped,
    "as_bool": _as_bool,
    "cast_to": _cast_to,
    "contiguous_if_empty": _contiguous_if_empty,
    "empty": torch.empty,
    "fitted": _fitted,
    "from_dlpack": from_dlpack,
    "is_of_the_program": is_of_the_program,
    "copy_with_strides": copy_with_strides,
    "processes": processes,
    "tensor": torch.tensor,
    "to_dlpack": to_dlpack,
    "torch": torch,
}
