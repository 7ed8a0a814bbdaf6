"""Writes docs/reference/versions.md from the records of the cells that were run, docs/reference/versions.jsonl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from typing import Any

from cells import CELLS, PYTHONS, ROOT, RUNTIMES, SAMPLE, TORCHES, Cell
from known_failures import KNOWN, Known
from run_cell import RECORDS, keep

PAGE = ROOT / "docs/reference/versions.md"
OTHERS = ("onnx", "onnx-ir", "onnxscript", "numpy")
Record = dict[str, Any]

OPENING = """\
# Versions and platforms

Supported: torch {torch}, {runtime}, Python {python}, Linux on x86-64.

Not tested: macOS, Windows, arm{untried}.

Newer versions are allowed. With `TORCH_LOGS=ort_dynamo`, a compile logs whether torch or ONNX Runtime is newer than
the tested versions. The oldest allowed version of every dependency is tested as well, in the row *oldest*
[below](#the-whole-test-suite). All tests on this page ran on a CPU; [GPU](../how_to/gpu.md) has the status on NVIDIA
GPUs.

"""

KNOWN_PROBLEMS = """\
Most of these are faults of one version of a dependency. Use a version without the fault if you need the feature. The
last column counts the tests that failed for this reason in the run that this page reports.

"""

RESULTS = """
## Results

**{passed:,} tests passed and {failed} failed**, in {run} combinations of versions. {clean} combinations have no
failure. {explained} have only failures that the table above explains{unexplained}.
"""

HOW = """\
## How the tests are run

- `nox -f .ci/noxfile.py` runs all combinations and writes this page from the records in
  [versions.jsonl](versions.jsonl). `python .ci/versions_page.py` writes the page again from the present records,
  without a test run.
- *sample*: {files} files, folders and single tests. They cover each stage of a compile and each package that the
  code uses. *whole*: all tests except the slow ones.
- Packages that a row does not name have the versions of `constraints-newest.txt`. The rows *oldest* and *stock* use
  `constraints-oldest.txt` and `constraints.txt` completely. Everything ran on the CPU, also with CUDA builds of
  torch.
- The checks of every change divide the whole suite among three more combinations, which are not in the tables: torch
  2.13.0 with onnxruntime-training 1.19.2 and with onnxruntime 1.31.1 (`constraints.txt`), and torch 2.15.0 with
  onnxruntime 1.32.0 (`constraints-newest.txt`).
- Combinations that differ in torch or Python have separate environments. In one environment the other packages are
  exchanged. A combination does not run in an environment with other versions than its own.
- {when}
"""


def main() -> None:
    """Write the page, and end with status 1 where a failure has no explanation."""
    record_missing_interpreters()
    records = read_records()
    PAGE.write_text(make_page(records))
    run = [record for record in records.values() if "not_run" not in record]
    unexplained = [(r, test) for r in run for test in failures(r) if not explain(r, test)]
    for record, test in unexplained:
        print(f"{record['cell']}: {test or record['ended']}: known_failures.py has no reason for it")
    raise SystemExit(bool(unexplained))


def record_missing_interpreters() -> None:
    """Keep a record of each cell that was never run because its interpreter is not there."""
    missing = [python for python in PYTHONS if not has_interpreter(python)]
    recorded = read_records()
    for cell in CELLS:
        if cell.python in missing and cell.name not in recorded:
            keep(RECORDS, {"cell": cell.name, "python": cell.python, "not_run": "no interpreter where this was run"})


def has_interpreter(python: str) -> bool:
    """Tell whether an interpreter is on the PATH, and is more than a shim."""
    command = shutil.which(f"python{python}")
    return command is not None and subprocess.run([command, "--version"], capture_output=True).returncode == 0


def read_records() -> dict[str, Record]:
    """Read the records by the names of their cells."""
    return {record["cell"]: record for record in map(json.loads, RECORDS.read_text().splitlines())}


def explain(record: Record, test: str) -> Known | None:
    """Find the reason why a test of a cell is known to fail."""
    return next((known for known in KNOWN if known.holds(record["python"], record["versions"], test)), None)


def make_page(records: dict[str, Record]) -> str:
    """Make the page's text."""
    run = [record for record in records.values() if "not_run" not in record]
    reasons = Counter(known for r in run for test in failures(r) if (known := explain(r, test)))
    unexplained = sum(1 for r in run if any(not explain(r, test) for test in failures(r)))
    clean = sum(not failures(r) for r in run)
    text = opening(records) + "## Known problems\n\n" + KNOWN_PROBLEMS + known_table(reasons)
    text += RESULTS.format(
        passed=sum(r["passed"] for r in run),
        run=len(run),
        failed=sum(len(r["failed"]) for r in run) or "none",
        clean=clean,
        explained=len(run) - clean - unexplained,
        unexplained=f", and {unexplained} have others" if unexplained else "",
    )
    text += "\n### torch and ONNX Runtime, with Python 3.11\n\n" + grid(records)
    text += "\n### Other Python versions\n\n" + rows(records, [c for c in CELLS if c.python != "3.11"])
    text += "\n### The oldest version of one package, all others at their newest\n\n"
    text += rows(records, [cell for cell in CELLS if cell.exchanged])
    text += "\n### The whole test suite\n\n" + rows(records, [cell for cell in CELLS if cell.suite == "whole"])
    others = [(r, test) for r in run for test in failures(r) if not explain(r, test)]
    if others:
        text += "\n### Failures without an explanation\n\n" + table(
            ("cell", "test"), ((r["cell"], f"`{test}`" if test else r["ended"]) for r, test in others)
        )
    return text + "\n" + HOW.format(files=len(SAMPLE), when=days_and_commits(run))


def opening(records: dict[str, Record]) -> str:
    """Name the versions that were run, and those that were not."""
    ran = {cell.python for cell in CELLS if "not_run" not in records.get(cell.name, {"not_run": ""})}
    pythons = [python for python in PYTHONS if python in ran] or [PYTHONS[0]]
    runtimes: dict[str, list[str]] = {}
    for name, version in (runtime.split("==") for runtime in RUNTIMES):
        runtimes.setdefault(name, []).append(version)
    return OPENING.format(
        torch=span([torch.rpartition(".")[0] for torch in TORCHES]),
        runtime=", ".join(f"{name} {span(versions)}" for name, versions in sorted(runtimes.items())),
        python=span(pythons),
        untried="".join(f", Python {python}" for python in PYTHONS if python not in ran),
    )


def span(versions: list[str]) -> str:
    """Write the first and the last of some versions."""
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


def failures(record: Record) -> list[str]:
    """Give the tests that failed, and an empty name where the run itself did not come to its end."""
    return [*record["failed"], *([""] if record["ended"] else [])]


def result(cell: Cell, records: dict[str, Record]) -> str:
    """Say in a few words how a cell ended."""
    record = records.get(cell.name)
    if record is None or "not_run" in record:
        return "not run" + (f": {record['not_run']}" if record else "")
    text = f"{record['passed']:,} passed"
    if record["failed"]:
        text += f", **{len(record['failed'])} failed**"
    return text + (f"; {record['ended']}" if record["ended"] else "")


def grid(records: dict[str, Record]) -> str:
    """Make the table of torch against ONNX Runtime."""
    by_place = {(c.torch, c.runtime): c for c in CELLS if c.python == "3.11" and not c.lane and not c.exchanged}
    head = ("sample", *(runtime.replace("==", " ") for runtime in RUNTIMES))
    return table(head, ([f"torch {t}", *(result(by_place[t, r], records) for r in RUNTIMES)] for t in TORCHES))


def rows(records: dict[str, Record], cells: Iterable[Cell]) -> str:
    """Make a table with a row for each cell, with the versions that were installed."""
    return table(
        ("cell", "Python", "torch", "ONNX Runtime", *OTHERS, "tests", "result", "minutes"),
        (describe(cell, records) for cell in cells),
    )


def describe(cell: Cell, records: dict[str, Record]) -> list[str]:
    """Make the row of one cell."""
    record = records.get(cell.name)
    name = cell.lane or ", ".join(pin.replace("==", " ") for pin in cell.exchanged)
    if record is None or "not_run" in record:
        runtime = cell.runtime.replace("onnxruntime-", "").replace("onnxruntime==", "").replace("==", " ")
        return [name, cell.python, cell.torch, runtime, *[""] * len(OTHERS), cell.suite, result(cell, records), ""]
    versions = record["versions"]
    runtime = versions.get("onnxruntime") or f"training {versions['onnxruntime-training']}"
    others = [versions[name] for name in OTHERS]
    minutes = f"{record['seconds'] / 60:.1f}"
    return [name, record["python"], versions["torch"], runtime, *others, cell.suite, result(cell, records), minutes]


def known_table(reasons: Counter[Known]) -> str:
    """Make the table of known problems, with the number of failures of each."""
    if not KNOWN:
        return "None.\n"
    return table(
        ("with", "what fails", "reason", "failures"),
        ((known.where, known.what, known.why, str(reasons[known])) for known in KNOWN),
    )


def days_and_commits(run: list[Record]) -> str:
    """Say on which days and at which commits the cells were run."""
    days = sorted({r["date"] for r in run})
    commits = sorted({r["commit"] for r in run})
    return f"Run on {' and '.join(days)} at {', '.join(commits)}."


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Make a table in Markdown."""
    head = list(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *lines))


if __name__ == "__main__":
    main()
