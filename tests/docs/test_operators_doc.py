"""Tests of docs/reference/operators.md: it matches the registry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ort_dynamo.__main__ import main
from ort_dynamo.commands.operators import table
from ort_dynamo.runtime.installed.capabilities import (
    TESTED_RUNTIMES,
    installed_runtime,
    kernel_table,
    recorded_kernel_table,
)

PAGE = Path(__file__).resolve().parent.parent.parent / "docs/reference/operators.md"


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    (version,) = re.findall(r"with torch ([\d.]+);", text)
    if version != torch.__version__.split("+")[0]:
        pytest.skip(f"the page speaks of torch {version}, whose operators differ from this one's")
    found = table.page()
    stale = set(found.splitlines()) ^ set(text.splitlines())
    assert found == text, f"run python -m ort_dynamo operators --write; lines that differ: {sorted(stale)[:8]}"


def test_the_command_prints_writes_and_checks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "page", lambda: "the table\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs/reference").mkdir(parents=True)
    assert main(["operators"]) == 0
    assert capsys.readouterr().out == "the table\n"
    assert main(["operators", "--check"]) == 1
    assert "operators --write" in capsys.readouterr().err
    assert main(["operators", "--write"]) == 0
    assert (tmp_path / "docs/reference/operators.md").read_text() == "the table\n"
    assert main(["operators", "--check"]) == 0


def test_the_record_of_kernels_agrees_with_the_installed_runtime() -> None:
    runtime = installed_runtime()
    if runtime not in TESTED_RUNTIMES:
        pytest.skip(f"{runtime} is not one of the tested runtimes")
    assert (
        recorded_kernel_table(runtime, "CPUExecutionProvider").keys()
        == kernel_table(runtime, "CPUExecutionProvider").keys()
    )
