"""tests/typing/user_program.py, which type checkers read, uses every public name; .ci/run runs mypy on it."""

from __future__ import annotations

import ast
from pathlib import Path

import ort_dynamo

PROGRAM = Path(__file__).resolve().parent / "typing" / "user_program.py"


def test_the_users_program_uses_every_public_name() -> None:
    tree = ast.parse(PROGRAM.read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert set(ort_dynamo.__all__) <= used
