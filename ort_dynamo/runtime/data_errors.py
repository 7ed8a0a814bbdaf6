"""Turn ONNX Runtime's errors about data and memory into errors with the user's operator, module and line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ort_dynamo.errors import (
    EmptyReductionError,
    ExecutionError,
    IndexOutOfBoundsError,
    IntegerDivisionByZeroError,
    InvalidValueError,
    SessionMemoryError,
)
from ort_dynamo.graph.marks import EMPTY, REFUSED, ZERO_DIVISOR

__all__ = ["data_error", "is_of_memory", "is_of_the_program"]

_NODE = re.compile(r"Name:\s*'([^']*)'")

_OUT_OF_BOUNDS = re.compile(r"out of (data )?bounds|out of range|invalid (index|indice) found", re.IGNORECASE)
"""Messages of the kernels of Gather, Scatter and the like about an index out of bounds."""

_OF_MEMORY = re.compile(r"Failed to allocate memory|bad_alloc|bad allocation")
"""Messages of ONNX Runtime's arena, and of the C++ library (in the second form, Microsoft's), when memory runs out."""

_INDEX = (
    re.compile(r"idx=(?P<index>-?\d+) must be within the inclusive range \[-?\d+,\s*(?P<last>-?\d+)\]"),
    re.compile(r"bounds \[-?\d+\s*,\s*(?P<last>-?\d+)\]\.? Actual value is (?P<index>-?\d+)"),
)
"""The messages with an index: those of Gather and GatherElements."""


_OF_PYBIND = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
"""The builtin exceptions that pybind makes of C++'s. ONNX Runtime's own are subclasses of Exception in its modules."""


def is_of_the_program(error: Exception) -> bool:
    """Check whether an exception raised in a call of ONNX Runtime is the program's, such as a signal handler's."""
    return not isinstance(error, _OF_PYBIND) and not type(error).__module__.startswith("onnxruntime")


def is_of_memory(words: str) -> bool:
    """Check whether a message of ONNX Runtime says that memory ran out."""
    return _OF_MEMORY.search(words) is not None


def data_error(words: str, places: Mapping[str, str]) -> ExecutionError:
    """Make the error for a graph that ONNX Runtime stopped.

    Args:
        words: ONNX Runtime's message.
        places: name of an ONNX node -> where it comes from in the user's code.
    """
    node = (_NODE.findall(words) or [""])[-1]  # of nodes in branches of one another, the innermost
    place = "".join(f"\n  {line}" for line in places.get(node, "").splitlines())
    if node.startswith(ZERO_DIVISOR):
        what = "ZeroDivisionError: an integer is divided by zero"
        return IntegerDivisionByZeroError(what=what, place=place, error=words)
    for mark, kind in ((REFUSED, InvalidValueError), (EMPTY, EmptyReductionError)):
        if node.startswith(f"{mark}."):
            return kind(what=node.partition(": ")[2], place=place, error=words)
    if _OUT_OF_BOUNDS.search(words) or any(pattern.search(words) for pattern in _INDEX):
        return IndexOutOfBoundsError(what=_which_index(words), place=place, error=words)
    if is_of_memory(words):
        return SessionMemoryError(what="a session of a compiled graph ran out of memory", place=place, error=words)
    return ExecutionError(what="ONNX Runtime stopped while running a compiled graph", place=place, error=words)


def _which_index(words: str) -> str:
    for pattern in _INDEX:
        if found := pattern.search(words):
            index, size = _as_given(int(found["index"])), int(found["last"]) + 1
            return f"index {index} is out of bounds for a dimension of size {size}"
    return "an index is out of bounds"


def _as_given(index: int) -> int:
    """Return the index that the program gave.

    Lowerings clear a bit of negative indices where torch does not count from the end.

    Those below -2**61 are reported after that change.
    """
    given = index + (1 << 62)
    return given if -(1 << 61) <= given < 0 else index
