"""Makes a model that Dynamo does not compile an error, where it would run in eager and say nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

from ort_dynamo.errors import NotCompiledError
from ort_dynamo.report.summary import given_up
from ort_dynamo.runtime.boxed import RunWatch
from ort_dynamo.torch_internals.frames import (
    frames,
    is_compiled_function,
    uncompiled,
    why_untraced,
    wrap_compiled_call,
)

__all__ = ["require_compiled"]

_Model = TypeVar("_Model", bound=Callable[..., Any])


def require_compiled(model: _Model, *, whole: bool = False) -> _Model:
    """Make the first call of a compiled model an error if no session of ONNX Runtime runs in it.

    The first call, with its compile, runs; then it is looked at. Graph breaks are not refused: fullgraph=True does
    that. Nodes in eager are not, either: fallback="error" does. After a call that is refused the next one is looked at
    again.

    Args:
        model: what torch.compile gave, or a module after module.compile(backend="ort_train").
        whole: refuse also if Dynamo gave up on a function that it met in this call, whose own code runs in eager. Such
            may be an LSTM's, or one of a library that does nothing with tensors.

    Returns:
        `model` itself if it is a module, and a function in its place otherwise.

    Raises:
        NotCompiledError: here, if `model` is not compiled at all; at the first call, as above, with Dynamo's reasons.
    """
    name = _name(model)
    if not isinstance(model, nn.Module):
        if not is_compiled_function(model):
            raise NotCompiledError(name=name, reasons=_NEVER)
        return cast(_Model, _checked(model, name, whole, lambda: None, lambda: None))
    undo: list[Callable[[], None]] = []

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        return _checked(call, name, whole, lambda: undo[0](), lambda: why_untraced(model))

    taken_out = wrap_compiled_call(model, wrap)
    if taken_out is None:
        raise NotCompiledError(name=name, reasons=_NEVER)
    undo.append(taken_out)
    return model


_NEVER = "\n  torch.compile was not called on it"


def _checked(
    call: Callable[..., Any], name: str, whole: bool, done: Callable[[], None], why: Callable[[], str | None]
) -> Callable[..., Any]:
    """`call`, looked at until a call of it was compiled.

    Args:
        call: the compiled call.
        name: how the error calls it.
        whole: refuse also where only a part runs in eager.
        done: called then.
        why: gives Dynamo's rule, if one leaves the model out.
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
        left_out = list(map(str, given_up(frames(begin))))
        if not watch.ran or (whole and left_out):
            rule = why()
            reasons = left_out or [rule or "no graph was compiled, or none of it goes to ONNX Runtime"]
            raise NotCompiledError(name=name, reasons="".join(f"\n  {reason}" for reason in reasons))
        passed = True
        done()
        return result

    return first


def _name(model: object) -> str:
    inner = uncompiled(model)
    return getattr(inner, "__qualname__", None) or type(inner).__qualname__
