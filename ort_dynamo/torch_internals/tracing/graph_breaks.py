"""Remember where and why Dynamo ends a graph within a function.

Dynamo's record of an attempt has the reasons for which it began anew. A branch on the value of a tensor is none of
them, and no reason has its line. All graph breaks pass through the function that writes them to Dynamo's log.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from ort_dynamo.torch_internals.lookup import private
from ort_dynamo.torch_internals.tracing.callers import outside_torch

__all__ = ["GraphBreak", "current_compile_id", "end_attempt", "logged_breaks"]

_LIMIT = 1024  # as many as the records of attempts that are kept

_translator = private("torch._dynamo.symbolic_convert:InstructionTranslatorBase")
_compile_context = private("torch._guards:CompileContext")


class GraphBreak(NamedTuple):
    """The end of a graph within a function.

    Attributes:
        reason: Dynamo's message.
        where: "file:line" at which the graph ends, outside of torch; of the function, where that is not known.
    """

    reason: str
    where: str


_begun: OrderedDict[str, dict[GraphBreak, None]] = OrderedDict()
_ended: OrderedDict[tuple[str, int], tuple[GraphBreak, ...]] = OrderedDict()


def current_compile_id() -> str | None:
    """torch's name for the attempt that a backend is called in, as in `Frame.compile_id`; None outside of one."""
    found = _compile_context.current_compile_id() if _compile_context else None
    return None if found is None else str(found)


def end_attempt(metrics: Any) -> None:
    """Keep the graph breaks of an attempt with its record, since torch uses its name again after a reset."""
    found = _begun.pop(str(metrics.compile_id), None)
    if found:
        _keep(_ended, _key(metrics), tuple(found))


def logged_breaks(metrics: Any) -> tuple[GraphBreak, ...]:
    """Return the graph breaks that Dynamo logged in an attempt that ended, in their order."""
    return _ended.get(_key(metrics), ())


def _key(metrics: Any) -> tuple[str, int]:
    return str(metrics.compile_id), getattr(metrics, "start_time_us", None) or 0


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    kept[key] = value
    while len(kept) > _LIMIT:
        kept.popitem(last=False)


def _remember(error: Any) -> None:
    attempt, stack = current_compile_id(), getattr(error, "real_stack", None)
    if attempt is None or not stack:
        return
    if attempt not in _begun:
        _keep(_begun, attempt, {})
    _begun[attempt][GraphBreak(getattr(error, "msg", str(error)), _innermost(stack))] = None


def _innermost(stack: Iterable[Any]) -> str:
    frames = list(stack)
    frame = next((one for one in reversed(frames) if outside_torch(one.filename)), frames[-1])
    return f"{frame.filename}:{frame.lineno}"


def _watch(log: Any) -> Any:
    @functools.wraps(log)
    def log_and_remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        error = kwargs.get("exc", next((one for one in args if isinstance(one, Exception)), None))
        _remember(error)
        return log(self, *args, **kwargs)

    return log_and_remember


if hasattr(_translator, "log_graph_break"):
    _translator.log_graph_break = _watch(_translator.log_graph_break)
