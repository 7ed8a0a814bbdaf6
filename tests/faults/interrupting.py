"""Interrupt a call at a chosen place in our code, as Ctrl-C does it between two steps of the interpreter."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_CHECKED = ("CALL", "JUMP_BACKWARD", "RESUME")
"""Instructions after which CPython looks for signals. Elsewhere an exception would leave a `with` without its exit."""


class Interrupter:
    """Raises KeyboardInterrupt at one event in the files whose paths contain `inside`.

    There is an event wherever CPython looks for signals: after a call, and where a function or another round of a loop
    begins.

    Args:
        at: the number of the event; a number that is too large raises nothing.
        inside: a part of the paths.

    Attributes:
        seen: the number of events so far.
        where: the function and line that was interrupted; "" if none was.
    """

    def __init__(self, at: int, inside: str) -> None:
        self.at, self.inside = at, inside
        self.seen, self.where = 0, ""
        self._before: dict[FrameType, str] = {}

    def run(self, function: Callable[[], Any]) -> bool:
        """Call a function, and say whether it came to its end."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            function()
        except BaseException:
            if not self.where:
                raise
            return False  # the interrupt, or an error that torch made of it
        finally:
            sys.settrace(before)
            self._before.clear()
        return True

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if self.where or self.inside not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if self.where:
            return None
        if event != "opcode":
            return self._step
        before = self._before.get(frame, "")
        self._before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if before.startswith(_CHECKED):
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self._step
