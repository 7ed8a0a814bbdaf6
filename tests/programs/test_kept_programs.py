"""Tests of programs that once failed: each of them is a file of the folder `kept`, which `hunt.py --keep` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from program_comparison import Case, check
from program_kept import keep, kept, read
from program_text import Input, Line, Program


@pytest.mark.parametrize("path", kept(), ids=lambda path: path.stem)
def test_a_kept_program_equals_eager(path: Path) -> None:
    state, found = check(read(path.read_text(encoding="utf-8")))
    assert state in ("ok", "torch"), "\n".join(str(one) for one in found)


def test_a_kept_program_is_the_failing_one(tmp_path: Path) -> None:
    program = Program(
        inputs=(Input("x0", (None, 3)),),
        parts={"p0": "nn.Linear(3, 3)"},
        body=(Line("v0 = self.p0(x0)", ("v0",)),),
        results=("v0",),
        dtype="bfloat16",
    )
    case = Case(program, "training", "sections", (2, 5))
    found = read(keep(case.text(), "wrong gradient: of 1", tmp_path).read_text())
    assert (found.mode, found.setting, found.batches) == (case.mode, case.setting, case.batches)
    assert found.program.precision == "bfloat16"
    assert found.text() == case.text()
