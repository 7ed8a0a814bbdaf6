"""Writes docs/reference/refused.md from the calls of refused_programs.py: `python tests/refused/write_page.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from refused_programs import CALLS, LEFT, Call

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).parents[2] / "docs/reference/refused.md"

_OPENING = """\
# What is refused

Eager's CPU kernels check values, sizes, indices, dtypes and dimensions. `ort_train` raises for the same arguments, an
error of eager's class, before an input or a buffer is written to. `python tests/refused/write_page.py` writes this page
from the calls that `tests/refused/` compares with eager, with torch {version}; PyTorch's own `error_inputs` are
compared in `tests/opinfo/test_opinfo.py`.

- A check of data is part of the session. It raises an `InvalidValueError`, an `EmptyReductionError` or an
  `IndexOutOfBoundsError` ([errors](errors.md)), with the operator and your line.
- An argument that is wrong whatever the data leaves its operator to torch, which raises its own error. torch's fake
  tensors refuse others while Dynamo traces.
- Dtypes and dimensions are compared for nearly every operator (`tests/refused/test_kernel_dtypes.py`,
  `tests/refused/test_refused_dtypes.py`). Tables say which dtypes a kernel takes and mixes
  (`ort_dynamo/lowering/kernel_dtypes.py`). torch runs any other call, and computes or raises. A dtype that only CUDA's
  kernels take is not refused there.
- On CUDA torch's kernels check less, and a session checks nothing. A file of `export_training_graph` has no checks.

| operator | arguments | eager raises |
|---|---|---|
"""

_REST = """
## What differs

| operator | arguments | how |
|---|---|---|
"""


def page() -> str:
    """Make the page."""
    lines = [_OPENING.format(version=torch.__version__.split("+")[0])]
    for operator in sorted({call.operator for call in CALLS}, key=str.lower):
        calls = [call for call in CALLS if call.operator == operator]
        faults = "; ".join(dict.fromkeys(call.fault for call in calls))
        classes = ", ".join(f"`{name}`" for name in sorted({_raises(call) for call in calls}))
        lines.append(f"| `{operator}` | {faults} | {classes} |\n")
    lines.append(_REST)
    lines += [f"| `{operator}` | {fault} | {how} |\n" for (operator, fault), how in LEFT.items()]
    return "".join(lines)


def _raises(call: Call) -> str:
    torch.manual_seed(0)
    try:
        call.function(*(one.detach().clone().requires_grad_(one.requires_grad) for one in call.tensors))
    except Exception as error:
        return "LinAlgError" if isinstance(error, torch.linalg.LinAlgError) else type(error).__name__
    raise AssertionError(f"eager takes {call.operator} of {call.fault}")


if __name__ == "__main__":
    PAGE.write_text(page())
