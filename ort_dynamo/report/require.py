"""Raise an error if a compiled model runs in eager; torch.compile would run it silently."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast

from torch import nn

from ort_dynamo.errors import InvalidArgumentError, NotCompiledError, NotInOnnxRuntimeError
from ort_dynamo.report.node_counts import PLACE, NodeCounts
from ort_dynamo.report.notes import at_limit, given_up
from ort_dynamo.report.reasons import limit_reason, rule
from ort_dynamo.report.record import RECORDS, GraphRecord
from ort_dynamo.runtime.boxed import RunWatch
from ort_dynamo.torch_internals.tracing.frames import (
    Frame,
    entered_codes,
    frames,
    is_compiled_function,
    module_number,
    uncompiled,
    why_untraced,
    wrap_compiled_call,
)

__all__ = ["require_compiled"]

_Model = TypeVar("_Model", bound=Callable[..., Any])


def require_compiled(model: _Model, *, whole: bool | Literal["onnxruntime"] = False) -> _Model:
    """Make the first call of a compiled model an error if it runs in eager.

    The check follows the first call and its compile. The call passes if a graph of ort_train ran in it. If such graphs
    have fallbacks, they must also have nodes that run in ONNX Runtime, or in torch by choice. Such a choice is no
    fallback: the option `placement` makes it, since torch is faster. Graph breaks pass, and Python between two
    graphs is not checked: use fullgraph=True to refuse them. A fallback beside other nodes passes, too: use
    fallback="error" to refuse it. If a call fails, the next one is checked again.

    Args:
        model: the result of torch.compile, or a module after module.compile(backend="ort_train").
        whole: True also fails if Dynamo skipped a function in this call, which then runs in eager. It may be an LSTM's,
            or a library function without tensors. "onnxruntime" fails in the same cases. It also fails if torch runs a
            node by choice or as a fallback, in a graph that ran in this call or in its backward, or if none of these
            graphs has a session. Nodes that torch runs by design, such as random ops and collectives, do not count.

    Returns:
        `model` itself if it is a module, else a function that wraps it.

    Raises:
        NotCompiledError: here, if `model` is not compiled at all; at the first call, as above, with the reasons.
        NotInOnnxRuntimeError: at the first call, for whole="onnxruntime" alone, with the nodes that torch runs, the
            reasons, and the option that changes it. It is a NotCompiledError.
        InvalidArgumentError: here, if `whole` has another value.
    """
    if not isinstance(whole, bool) and whole != "onnxruntime":
        raise InvalidArgumentError(
            function="require_compiled", name="whole", value=whole, expected="True, False or 'onnxruntime'"
        )
    name = _name(model)
    if not isinstance(model, nn.Module):
        if not is_compiled_function(model):
            raise NotCompiledError(name=name, reasons=_NEVER)
        return cast(_Model, _checked(model, name, whole, lambda: None, lambda: _before(model, model)))
    undo: list[Callable[[], None]] = []

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        return _checked(call, name, whole, lambda: undo[0](), lambda: _rule(model) or _before(model, call))

    taken_out = wrap_compiled_call(model, wrap)
    if taken_out is None:
        raise NotCompiledError(name=name, reasons=_NEVER)
    undo.append(taken_out)
    return model


def _rule(module: nn.Module) -> str | None:
    reason = why_untraced(module)
    return None if reason is None else rule(reason)


def _before(model: object, call: Callable[..., Any]) -> str | None:
    """Return why an earlier call left the function that this one enters in eager; None if none did.

    torch counts the recompiles of a function for all modules that share its code. If it gives up on the function for
    one of them, it skips the code for all later ones.
    """
    codes, seen = entered_codes(model, call), frames(RECORDS.since)
    number = module_number(inner) if isinstance(inner := uncompiled(model), nn.Module) else None

    def enters(frame: Frame) -> bool:
        return (frame.function, frame.begins) in codes

    def is_its(frame: Frame) -> bool:
        return enters(frame) and (frame.caller is None or number in (None, frame.caller.number))

    reached = [frame for frame in seen if frame.limit and enters(frame)]
    if reached:
        return f"{_name(model)}: {limit_reason(reached[-1])}"
    if own := list(map(str, given_up(seen, is_its))):
        return "\n".join(own)
    others = list(map(str, given_up(seen, enters)))
    return "\n".join([_NO_GRAPH, _SHARED, *others]) if others else None


_NO_GRAPH = "no graph was compiled by ort_train, or none of its graphs ran"
_SHARED = (
    "Dynamo gave up on the same code for another module, and then skips it for every module. torch.compiler.reset() "
    "forgets that:"
)
_NEVER = "\n  torch.compile was not called on it"


def _checked(
    call: Callable[..., Any],
    name: str,
    whole: bool | Literal["onnxruntime"],
    done: Callable[[], None],
    why: Callable[[], str | None],
) -> Callable[..., Any]:
    """Wrap `call` with the check until a call has passed.

    Args:
        call: the compiled call.
        name: its name in the error.
        whole: as in `require_compiled`.
        done: called when a call has passed.
        why: gives the known reason if Dynamo skipped the model in this call.
    """
    passed = False

    @functools.wraps(call)
    def first(*args: Any, **kwargs: Any) -> Any:
        nonlocal passed
        if passed:
            return call(*args, **kwargs)
        begin = time.time()
        with RunWatch() as watch:
            result = call(*args, **kwargs)
        seen = frames(begin)
        left_out = [*map(str, given_up(seen)), *map(str, at_limit(seen))]
        if not watch.seen or (whole and left_out):
            reasons = left_out or [why() or _NO_GRAPH]
            raise NotCompiledError(name=f"A part of {name}" if watch.seen else name, reasons=_indented(reasons))
        error = _refused(name, whole, [graph for graphs in watch.seen for graph in graphs])
        if error is not None:
            raise error
        passed = True
        done()
        return result

    return first


def _refused(name: str, whole: bool | Literal["onnxruntime"], graphs: Sequence[GraphRecord]) -> NotCompiledError | None:
    """Return the error for compiled graphs, if they run elsewhere than they have to."""
    found = NodeCounts.of(graphs)
    roles = ", ".join(dict.fromkeys(graph.role for graph in graphs))
    reasons = _indented([f"nodes ({roles}): {found}", *found.outside_sessions()])
    if found.eager and not (found.native or found.chosen):
        return NotCompiledError(name=name, reasons=reasons)
    in_sessions = not (found.chosen or found.eager) and any(graph.islands for graph in graphs)
    if whole != "onnxruntime" or in_sessions:
        return None
    advice = [PLACE] * bool(found.chosen) + [_LOWER] * bool(found.eager)
    return NotInOnnxRuntimeError(name=name, reasons=reasons, advice="\n".join(advice or [_EMPTY]))


_LOWER = "A fallback has no form in ONNX Runtime: change its line, or add a lowering with ort_dynamo.register_lowering."
_EMPTY = "Its graphs have nothing for a session to run."


def _indented(texts: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for text in texts for line in text.splitlines())


def _name(model: object) -> str:
    inner = uncompiled(model)
    return getattr(inner, "__qualname__", None) or type(inner).__qualname__
