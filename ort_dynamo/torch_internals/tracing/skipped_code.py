"""Make Dynamo trace functions again that it has left to eager mode because of an error of the program's."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import CodeType

from ort_dynamo.torch_internals.lookup import private
from ort_dynamo.torch_internals.tracing.frames import frames

__all__ = ["trace_again"]

_set_strategy = private("torch._C._dynamo.eval_frame:set_code_exec_strategy")
_strategy = private("torch._dynamo.types:FrameExecStrategy")
_action = private("torch._dynamo.types:FrameAction")


def trace_again(error: BaseException, since: float) -> None:
    """Make Dynamo trace the functions that it gave up on since a time, and that raised an error, at their next call.

    Dynamo leaves a function to eager for good once it has met an exception of the program's in it. If torch lacks the
    setting, they stay there.

    Args:
        error: the error. Functions that raised one that it came from count, too.
        since: seconds since the epoch.
    """
    if None in (_set_strategy, _strategy, _action):
        return
    skipped = {(frame.function, frame.begins) for frame in frames(since) if frame.failure and not frame.limit}
    for code in _raised_by(error):
        if (code.co_name, (code.co_filename, code.co_firstlineno)) in skipped:
            _set_strategy(code, _strategy(_action.DEFAULT, _action.DEFAULT))


def _raised_by(error: BaseException) -> Iterator[CodeType]:
    """Yield the code of the functions that an error passed through, and those that it came from."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield from (frame.f_code for frame, _ in traceback.walk_tb(one.__traceback__))
            left += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
