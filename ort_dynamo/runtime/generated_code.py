"""Python code generated for one graph, so that a call runs straight lines without repeated checks."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["generate_function"]

_numbers = itertools.count()


def generate_function(name: str, lines: Sequence[str], values: Mapping[str, Any]) -> Callable[..., Any]:
    """Make a function from source.

    `inspect.getsource(function)` and tracebacks show its lines.

    Args:
        name: the name of the function.
        lines: its definition, from `def` on.
        values: the globals that it reads, by name.
    """
    source = "".join(f"{line}\n" for line in lines)
    file = f"<ort_dynamo {name} {next(_numbers)}>"
    namespace = dict(values)
    exec(compile(source, file, "exec"), namespace)
    function: Callable[..., Any] = namespace.pop(name)  # whose reference to itself would keep it alive
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    weakref.finalize(function, linecache.cache.pop, file, None)
    return function
