"""Runs the suite on releases that pip installed without constraints, and says which release broke which test.

For the environment of this interpreter, into which this project was installed as a user installs it (not editable). The
tests run against that copy. Where tests fail, the packages that differ from the pinned ones are brought back to their
pins, and the tests that failed are run again: one that passes then was broken by a release. Each release is then tried
alone among the pinned versions, to tell which.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cells import BOUND_TO_TORCH, ROOT, SAMPLE, package_of, read_pins
from run_suite import Outcome, run_suite

Changes = dict[str, tuple[str | None, str | None]]  # package: pinned version, installed version


def main() -> None:
    """Run the suite, and end with status 1 where a test fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", default="constraints-newest.txt", help="the pinned versions to compare with")
    parser.add_argument("--sample", action="store_true", help="the sample of the tests instead of the whole suite")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    check_installed_copy()
    changes = compare(read_versions(ROOT / options.against), installed_versions())
    print(describe_changes(changes, options.against), flush=True)
    outcome = run(SAMPLE if options.sample else (), options.workers)
    if not outcome.failed and not outcome.ended:
        print(f"{outcome.passed} passed, {outcome.skipped} skipped, none failed in {outcome.seconds} s")
        return
    print(f"{len(outcome.failed)} failed: {outcome.ended}\n" + "\n".join(outcome.failed), flush=True)
    if outcome.failed:
        print("\n".join(attribute(changes, outcome.failed, options.workers)))
    raise SystemExit(1)


def check_installed_copy() -> None:
    """Refuse an environment in which this project is the checkout itself, and not an installed copy."""
    program = "import ort_dynamo; print(ort_dynamo.__file__)"
    file = subprocess.run([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    if "site-packages" not in file:
        raise SystemExit(f"ort_dynamo is imported from {file}, which is no installed copy")


def run(tests: Sequence[str], workers: int) -> Outcome:
    """Run tests against the installed copy: not from the current folder, of which only bench/ is importable."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "bench").symlink_to(ROOT / "bench")
        pytest = str(Path(sys.executable).with_name("pytest"))  # unlike `python -m pytest`, adds no current folder
        return run_suite([pytest], tests, workers, ROOT, {"PYTHONPATH": folder, "PATH": path_with_this_first()})


def path_with_this_first() -> str:
    """Give a PATH on which this environment's commands are found first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def read_versions(file: Path) -> dict[str, str]:
    """Read the pinned versions of a constraints file."""
    return {name: pin.split("==")[1] for name, pin in read_pins(file).items()}


def installed_versions() -> dict[str, str]:
    """Give the versions of all that is installed here, but for this project and pip."""
    versions = {package_of(d.metadata["Name"]): d.version.split("+")[0] for d in importlib.metadata.distributions()}
    return {name: version for name, version in versions.items() if name not in ("ort-dynamo", "pip")}


def compare(pinned: dict[str, str], installed: dict[str, str]) -> Changes:
    """List installed packages that are not pinned, or not to this version. A missing package is no change."""
    return {name: (pinned.get(name), version) for name, version in installed.items() if pinned.get(name) != version}


def describe_changes(changes: Changes, against: str) -> str:
    """Describe the packages whose installed version is not the pinned one."""
    lines = [f"  {name}: {old or 'not pinned'} -> {new}" for name, (old, new) in sorted(changes.items())]
    return "\n".join([f"changed against {against}: {len(lines) or 'nothing'}", *lines])


def releases(changes: Changes) -> dict[str, tuple[list[str], list[str]]]:
    """Give the pinned and the new requirements of each release; torch and the packages that it pins count as one."""
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for name, (old, new) in sorted(changes.items()):
        if old is not None:
            before, after = groups.setdefault("torch" if BOUND_TO_TORCH.fullmatch(name) else name, ([], []))
            before.append(f"{name}=={old}")
            after.append(f"{name}=={new}")
    return groups


def attribute(changes: Changes, failed: Sequence[str], workers: int) -> list[str]:
    """Say for each test that failed whether it passes with the pinned versions, and which release breaks it."""
    groups = releases(changes)
    if not groups:
        return ["all versions are the pinned ones: these failures are of the project itself"]
    for before, _ in groups.values():
        exchange(before)
    with_pins = run(failed, workers)
    broken = [test for test in failed if test not in with_pins.failed]
    lines = [f"fails with the pinned versions, too: {test}" for test in with_pins.failed]
    if with_pins.ended:
        lines.append(f"with the pinned versions: {with_pins.ended}")
    alone: dict[str, list[str]] = {test: [] for test in broken}
    for name, (before, after) in groups.items():
        if not broken:
            break
        exchange(after)
        for test in run(broken, workers).failed:
            alone.setdefault(test, []).append(name)
        exchange(before)
    new = {name: ", ".join(after) for name, (_, after) in groups.items()}
    for test, names in alone.items():
        culprits = " and by ".join(new[name] for name in names) or "several releases together"
        lines.append(f"passes with the pinned versions, broken by {culprits}: {test}")
    return lines


def exchange(requirements: Sequence[str]) -> None:
    """Install exactly these versions in the place of those that are there."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *requirements],
        check=True,
    )


if __name__ == "__main__":
    main()
