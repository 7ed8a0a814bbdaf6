"""Tests of reports about a whole process run in processes of their own: other tests leave models behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked import run_program

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", ["summary", "modules", "require"])
def test_in_a_process_of_its_own(name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    program = "import sys; del sys.path[0]; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["-q", "-p", "no:cacheprovider", str(HERE / f"alone_{name}.py")]
    done = run_program(program, *arguments, cwd=HERE.parents[1], env=environment)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
