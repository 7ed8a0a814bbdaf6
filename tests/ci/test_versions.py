"""The matrix of versions: its cells are possible, its records are read right, and its page agrees with the records."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cells import CELLS, PYTHONS, ROOT, RUNTIMES, SAMPLE, TORCHES, Cell, read_pins
from known_failures import KNOWN, Known
from run_cell import keep
from run_suite import run_suite
from try_fresh import compare, describe_changes, releases
from versions_page import PAGE, make_page, read_records

from ort_dynamo.runtime.installed.capabilities import NEWEST_TESTED
from ort_dynamo.torch_internals.release import release
from ort_dynamo.torch_internals.versions import TESTED

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def minimums() -> dict[str, str]:
    required = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    named = (re.match(r"([\w-]+)(?:\[[\w,]+\])?(?:>=([\d.]+))?", line) for line in required)
    return {match[1]: match[2] for match in named if match and match[2]}


def test_the_oldest_lane_is_the_declared_minimums() -> None:
    pinned = {name: pin.split("==")[1] for name, pin in read_pins(ROOT / "constraints-oldest.txt").items()}
    declared = minimums()
    del declared["onnxruntime-gpu"]  # the other name of onnxruntime
    assert set(pinned) == set(declared)
    for name, lowest in declared.items():
        assert re.fullmatch(re.escape(lowest) + r"(\.\d+)*", pinned[name]), (name, lowest, pinned[name])


def test_every_torch_is_tried_with_every_runtime() -> None:
    tried = {(cell.torch, cell.runtime) for cell in CELLS if not cell.lane and not cell.exchanged}
    assert {(torch, runtime) for torch in TORCHES for runtime in RUNTIMES} <= tried
    assert {cell.python for cell in CELLS} == set(PYTHONS)
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_the_versions_that_are_said_to_be_tested_are_those_of_the_matrix() -> None:
    assert tuple(map(release, TESTED)) == (release(TORCHES[0]), release(TORCHES[-1]))
    assert release(NEWEST_TESTED) == max(release(runtime.split("==")[1]) for runtime in RUNTIMES)


def test_the_sample_names_existing_files() -> None:
    assert [name for name in SAMPLE if not (ROOT / name.split("::")[0]).exists()] == []


def test_a_cell_pins_its_own_torch_and_runtime_and_nothing_that_another_torch_is_bound_to() -> None:
    pins = Cell("3.11", "2.12.1", "onnxruntime==1.30.0", exchanged=("onnx==1.18.0",)).pins()
    assert {"torch==2.12.1", "onnxruntime==1.30.0", "onnx==1.18.0"} <= set(pins)
    assert not [pin for pin in pins if pin.startswith(("nvidia-", "cuda-", "triton", "setuptools"))]
    newest = set(Cell("3.11", "2.15.0", "onnxruntime==1.32.0", "whole", lane="newest").pins())
    assert newest == set(read_pins(ROOT / "constraints-newest.txt").values())


def test_a_record_takes_the_place_of_the_older_one_of_its_cell(tmp_path: Path) -> None:
    first, second = CELLS[0].name, CELLS[1].name
    for record in ({"cell": second, "passed": 1}, {"cell": first, "passed": 2}, {"cell": second, "passed": 3}):
        keep(tmp_path / "records", record)
    assert (tmp_path / "records").read_text() == (
        f'{{"cell": "{first}", "passed": 2}}\n{{"cell": "{second}", "passed": 3}}\n'
    )


def test_the_page_is_made_from_the_records() -> None:
    assert PAGE.read_text() == make_page(read_records()), "run `nox -f .ci/noxfile.py -s report`"


def record_of(cell: Cell, **changed: object) -> dict[str, object]:
    versions = {"torch": cell.torch, "onnx": "1", "onnx-ir": "1", "onnxscript": "1", "numpy": "2"}
    name, version = cell.runtime.split("==")
    plain = {"passed": 7, "skipped": 0, "failed": [], "seconds": 60, "ended": "", "commit": "abc", "date": "2026-01-01"}
    return {"cell": cell.name, "python": "3.11.7", "versions": {**versions, name: version}, **plain, **changed}


def test_the_page_lists_unexplained_failures_and_cells_that_were_not_run() -> None:
    page = make_page({CELLS[0].name: record_of(CELLS[0], failed=["tests/test_a.py::test_b"])})
    assert "7 passed, **1 failed**" in page
    assert f"| {CELLS[0].name} | `tests/test_a.py::test_b` |" in page
    assert "3.14 | 2.15.0 | 1.32.0 |  |  |  |  | sample | not run |" in page
    last = next(cell for cell in CELLS if cell.python == "3.14")
    missing = make_page({last.name: {"cell": last.name, "python": "3.14", "not_run": "no interpreter"}})
    assert "3.14 | 2.15.0 | 1.28.0 |  |  |  |  | sample | not run: no interpreter |" in missing
    ended = make_page({CELLS[0].name: record_of(CELLS[0], ended="pytest ended with status 3")})
    assert "7 passed; pytest ended with status 3" in ended
    assert f"| {CELLS[0].name} | pytest ended with status 3 |" in ended


def test_a_known_failure_is_known_for_its_versions_only() -> None:
    known = Known("onnxruntime 1.30", "b", "c", r"tests/test_a\.py::.*", (("onnxruntime", r"1\.30\..*"),))
    assert known.holds("3.11.7", {"onnxruntime": "1.30.0"}, "tests/test_a.py::test_b[1]")
    assert not known.holds("3.11.7", {"onnxruntime": "1.31.0"}, "tests/test_a.py::test_b[1]")
    assert not known.holds("3.11.7", {"onnxruntime-training": "1.19.2"}, "tests/test_a.py::test_b[1]")
    assert not known.holds("3.11.7", {"onnxruntime": "1.30.0"}, "tests/test_b.py::test_b[1]")


def test_every_known_failure_happened_in_the_run_that_the_page_is_of() -> None:
    records = [record for record in read_records().values() if "not_run" not in record]
    for known in KNOWN:
        assert any(known.holds(r["python"], r["versions"], t) for r in records for t in [*r["failed"], ""]), known


def test_a_suite_is_counted_and_its_failures_are_named_as_pytest_takes_them(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow']")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', ['a.b', 'c/d'])\n"
        "def test_f(x): assert x == 'a.b'\n"
        "class TestC:\n"
        "    def test_m(self): raise ValueError\n"
        "def test_skipped(): pytest.skip('so')\n"
    )
    outcome = run_suite([sys.executable, "-m", "pytest"], [], 1, tmp_path)
    assert outcome.failed == ("deep/test_it.py::TestC::test_m", "deep/test_it.py::test_f[c/d]")
    assert (outcome.passed, outcome.skipped, outcome.ended) == (1, 1, "")
    again = run_suite([sys.executable, "-m", "pytest"], outcome.failed, 1, tmp_path)
    assert again.failed == outcome.failed
    assert again.passed == 0
    assert run_suite([sys.executable, "-m", "pytest"], ["none.py"], 1, tmp_path).ended == "pytest ended with status 4"


def test_changes_compare_installed_with_pinned_versions() -> None:
    pinned = {"onnx": "1", "torch": "2", "nvidia-x": "3", "not-here": "4"}
    changes = compare(pinned, {"onnx": "1", "torch": "2.1", "nvidia-x": "3.1", "new": "5"})
    assert changes == {"torch": ("2", "2.1"), "nvidia-x": ("3", "3.1"), "new": (None, "5")}
    assert releases(changes) == {"torch": (["nvidia-x==3", "torch==2"], ["nvidia-x==3.1", "torch==2.1"])}
    assert "  new: not pinned -> 5\n  nvidia-x: 3 -> 3.1\n  torch: 2 -> 2.1" in describe_changes(changes, "file")


@pytest.mark.parametrize("script", ["run_cell.py", "try_fresh.py"])
def test_the_scripts_print_their_usage(script: str) -> None:
    command = [sys.executable, str(ROOT / ".ci" / script), "--help"]
    assert "usage" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
