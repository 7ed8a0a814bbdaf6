"""Writes docs/reference/refused.md from the calls of refused_programs.py: `python tests/refused/write_page.py`."""

from __future__ import annotations

from pathlib import Path

import torch
from refused_programs import CALLS, LEFT, Call

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).parents[2] / "docs/reference/refused.md"

_OPENING = """\
# Refused arguments

Eager mode's CPU kernels check values, sizes, indices, dtypes and dimensions. `ort_train` raises an error for the
same arguments, before anything is written to an input or a buffer. The error has eager's class, or a subclass of it,
with one exception [below](#exceptions). Errors that torch raises while it traces have the class that
`backend="aot_eager"` gives.

- **A fault in the data**, such as an index out of bounds: the compiled graph raises an `InvalidValueError`, an
  `EmptyReductionError` or an `IndexOutOfBoundsError` ([errors](errors.md)), or the `RuntimeError` of torch's own
  assertion. The message has the operator and your line.
- **A fault in an argument that does not depend on data**: torch runs this operator, and raises its own error.
- **A fault in shapes or dtypes**: torch raises its own error, while Dynamo traces or when it runs this operator.

On CUDA, torch's kernels check less and sessions check nothing. Files of `export_training_graph` have no checks.

`ort_dynamo/lowering/kernel_dtypes.py` lists the dtypes that each CPU kernel of torch accepts and mixes. torch runs
calls with other dtypes, and computes or raises. A dtype that only CUDA kernels accept is not refused on CUDA.

The table has the calls that `tests/refused` compares with eager mode. Three more tests compare dtypes and dimensions
of nearly every operator (`test_kernel_dtypes.py`, `test_refused_dtypes.py`) and PyTorch's own `error_inputs`
(`tests/opinfo/test_opinfo.py`). `python tests/refused/write_page.py` wrote this page with torch {version}; do not
edit it.

| operator | arguments | eager raises |
|---|---|---|
"""

_REST = """
## Exceptions

| operator | arguments | difference |
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
