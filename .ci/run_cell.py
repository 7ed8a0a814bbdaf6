"""Runs the tests of one cell in this interpreter's environment and adds the record to docs/reference/versions.jsonl."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

from cells import CELLS, ROOT, SAMPLE, Cell
from run_suite import Outcome, pytest_here, run_suite

RECORDS = ROOT / "docs/reference/versions.jsonl"
REPORTED = ("torch", "onnxruntime", "onnxruntime-training", "onnx", "onnx-ir", "onnxscript", "numpy")


def main() -> None:
    """Run a cell by its name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[cell.name for cell in CELLS])
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    cell = next(cell for cell in CELLS if cell.name == options.name)
    check_versions(cell)
    # The page is compared with the records in a test, and these are being made.
    tests = SAMPLE if cell.suite == "sample" else ("--ignore=tests/ci/test_versions.py",)
    outcome = run_suite(pytest_here(), tests, options.workers, ROOT)
    keep(RECORDS, make_record(cell, outcome))
    print(f"{cell.name}: {outcome.passed} passed, {len(outcome.failed)} failed, {outcome.seconds} s {outcome.ended}")


def installed() -> dict[str, str]:
    """Give the versions of the packages that the page reports, as they are installed here."""
    versions = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    return {name: versions[name] for name in REPORTED if name in versions}


def check_versions(cell: Cell) -> None:
    """Refuse an environment that is not the cell's: its record would be of something else."""
    here = installed()
    wanted = dict(pin.split("==") for pin in cell.pins())
    runtime, version = cell.runtime.split("==")
    here_without_builds = {name: found.split("+")[0] for name, found in here.items()}
    expected = {name: wanted[name] for name in REPORTED if not name.startswith("onnxruntime")} | {runtime: version}
    if here_without_builds != expected:
        raise SystemExit(f"this environment is not the cell's: it has {here}, and the cell is {expected}")


def make_record(cell: Cell, outcome: Outcome) -> dict[str, object]:
    """Make the record of a cell's run."""
    commit = ask_git("rev-parse", "--short", "HEAD")
    # The records themselves change from cell to cell.
    changed = ask_git("status", "--porcelain", "--", ".", ":!docs/versions.*")
    return {
        "cell": cell.name,
        "suite": cell.suite,
        "python": platform.python_version(),
        "versions": installed(),
        "passed": outcome.passed,
        "skipped": outcome.skipped,
        "failed": outcome.failed,
        "seconds": outcome.seconds,
        "ended": outcome.ended,
        "commit": f"{commit}-dirty" if changed else commit,
        "date": datetime.date.today().isoformat(),
    }


def ask_git(*arguments: str) -> str:
    """Return the output of a git command in this checkout."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def keep(records: Path, record: dict[str, object]) -> None:
    """Write a record among the others, in the order of the cells and in the place of an older one of the same cell."""
    lines = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    by_name = {line["cell"]: line for line in lines} | {record["cell"]: record}
    ordered = [by_name[cell.name] for cell in CELLS if cell.name in by_name]
    records.write_text("".join(json.dumps(line) + "\n" for line in ordered))


if __name__ == "__main__":
    main()
