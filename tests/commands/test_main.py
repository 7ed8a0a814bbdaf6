"""The command line itself."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from ort_dynamo.__main__ import main


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ort_dynamo {version('ort-dynamo')}\n"


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ort_dynamo", "operators"]
    with (
        (tmp_path / "errors").open("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as program,
    ):
        assert program.stdout is not None
        assert program.stdout.read(1)
        program.stdout.close()
        assert program.wait(timeout=120) == 0
        errors.seek(0)
        assert errors.read() == ""
