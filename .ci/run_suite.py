"""Runs tests of this project in this interpreter's environment, and returns their outcome."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LONGEST = 90 * 60  # seconds; the whole suite takes a sixth of it


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run of pytest."""

    passed: int
    skipped: int
    failed: tuple[str, ...]  # node ids that pytest takes again
    seconds: int
    ended: str  # empty where pytest came to its end; otherwise why there is no report


def run_suite(
    command: Sequence[str], tests: Sequence[str], workers: int, root: Path, environment: dict[str, str] | None = None
) -> Outcome:
    """Run the fast tests among some files or node ids (all of them where none is given)."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        arguments = [
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit1",
        ]
        if workers > 1:
            arguments += ["-n", str(workers)]
        ended = ""
        try:
            status = subprocess.run(
                [*command, *arguments, *tests],
                cwd=root,
                env={**os.environ, **(environment or {})},
                check=False,
                timeout=LONGEST,
            ).returncode
            if status not in (0, 1):
                ended = f"pytest ended with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {LONGEST // 60} minutes"
        seconds = round(time.monotonic() - started)
        if not report.exists():
            return Outcome(0, 0, (), seconds, ended or "pytest wrote no report")
        passed, skipped, failed = read_report(report)
    return Outcome(passed, skipped, failed, seconds, ended)


def read_report(report: Path) -> tuple[int, int, tuple[str, ...]]:
    """Count the passed and skipped tests of a JUnit report, and name the failed ones."""
    passed = skipped = 0
    failed = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(node_id(case))
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, tuple(sorted(set(failed)))


def node_id(case: ElementTree.Element) -> str:
    """Give the node id of a test case, of its file, its class if it has one, and its name."""
    file, classname, name = (case.get(key, "") for key in ("file", "classname", "name"))
    if not file:  # a file that could not be imported, or a worker that ended: there is no test to name
        return (classname or name).replace(".", "/") if classname else name
    inside = classname.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join([file, *inside.split("."), name] if inside else [file, name])


def pytest_here() -> list[str]:
    """Give the command of pytest under this interpreter, with the current folder first among the imports."""
    return [sys.executable, "-m", "pytest"]
