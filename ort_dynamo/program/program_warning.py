"""Warns at the program's line, wherever in a compile the reason is found."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

__all__ = ["FRAMEWORKS", "warn_program"]


def warn_program(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line on the stack that is neither torch's nor ours: the program's call."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=depth)


_PACKAGE = Path(__file__).resolve().parents[1]
FRAMEWORKS = (
    *(f"{folder}{os.sep}" for folder in (_PACKAGE, (_PACKAGE / "passes").resolve(), Path(torch.__file__).parent)),
    "<",  # code that torch or we generate, and frozen parts of Python
)
"""Beginnings of the file names of torch's code and ours."""

_NOT_THE_PROGRAM = (*FRAMEWORKS, f"{Path(os.__file__).parent}{os.sep}contextlib.py")
