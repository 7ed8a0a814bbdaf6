"""Tests of bench/device.py on the CPU, with the code that checks a device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from workers import ENDS_ITS_PROCESS

device = pytest.importorskip("bench.device", reason="bench is importable under `python -m pytest` only")
parts = pytest.importorskip("bench.device_parts")
models = pytest.importorskip("bench.device_models")
places = pytest.importorskip("bench.cuda_device")

PLAN = parts.Plan("cpu", "tiny", units=5)


# -- the whole of it ---------------------------------------------------------------------------------------------------


def run(tmp_path: Path, *given: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "device.json"
    status = device.main(["--device", "cpu", "--workers", "1", "--out", str(out), *given])
    found: dict[str, Any] = json.loads(out.read_text())
    return status, found


def test_facts_and_operators_run_in_processes_and_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(tmp_path, "--parts", "facts", "operators", "--only", "float32", "--units", "20")
    cases = found["cases"]
    wrong = [case for case in cases if case["kind"] not in ("right", "skipped")]
    assert not wrong
    assert status == 0
    assert {case["part"] for case in cases} == {"facts", "operators"}
    assert all("float32" in case["name"] for case in cases)
    assert capsys.readouterr().out.startswith("nothing was wrong\n")


def test_models_and_marked_tests_run_in_processes(tmp_path: Path) -> None:
    assert run(tmp_path, "--parts", "models", "--only", "mlp, plain")[0] == 0
    status, found = run(tmp_path, "--parts", "tests", "--only", "test_a_result_is_retained")
    (case,) = found["cases"]
    assert case["kind"] == ("right" if torch.cuda.is_available() else "skipped"), case["detail"]
    assert status == 0


def test_nothing_begins_after_the_end_and_that_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run(tmp_path, "--parts", "facts", "--only", "Clip", "--seconds", "0")
    assert status == 1
    assert {case["kind"] for case in found["cases"]} == {"not run"}
    assert capsys.readouterr().out.startswith("nothing was wrong, but no case ran of facts\n")


def test_a_name_that_no_case_has_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(tmp_path, "--parts", "facts", "--only", "no such case")
    assert (status, found["cases"]) == (1, [])
    assert capsys.readouterr().out.startswith("no case has such a name\n")


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "run_all", None)  # not to be called
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "none")
    assert ended.value.code == 2
    assert "cannot write --out: " in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_how_to_try_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert device.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err


# -- the schedule ------------------------------------------------------------------------------------------------------


class Runs:
    """A worker without a process."""

    def __init__(self, kind: Callable[[Any], str] = lambda job: "right") -> None:
        self.kind, self.ran, self.stopped = kind, [], False  # type: ignore[var-annotated]

    def run(self, job: Any) -> list[dict[str, Any]]:
        self.ran.append(f"{job.part} {job.name}")
        return [{"kind": self.kind(job), "detail": "why", "found": {}, "took": 1.5}]

    def stop(self) -> None:
        self.stopped = True


def part(names: Callable[[Any], list[str]], until: float = 1.0) -> Any:
    return parts.Part(names, lambda name, plan: {}, until)


def test_cases_run_in_the_order_of_their_parts() -> None:
    worker = Runs()
    made = {"one": part(lambda plan: ["a", "b"]), "two": part(lambda plan: ["c"])}
    kept: list[int] = []
    schedule = device.Schedule(made, PLAN, time.monotonic(), 100.0, lambda records: kept.append(len(records)))
    records = device.run_all(schedule, [worker])
    assert worker.ran == ["one a", "one b", "two c"]
    assert worker.stopped
    assert kept == [1, 2, 3]
    assert not device.is_bad(records)


def test_several_workers_run_each_case_once() -> None:
    workers = [Runs() for _ in range(3)]
    made = {"one": part(lambda plan: [str(index) for index in range(50)])}
    device.run_all(device.Schedule(made, PLAN, time.monotonic(), 100.0), workers)
    ran = [name for worker in workers for name in worker.ran]
    assert sorted(ran) == sorted(f"one {index}" for index in range(50))


def test_a_part_that_is_late_is_not_run_and_the_others_are() -> None:
    made = {"one": part(lambda plan: ["a"]), "two": part(lambda plan: ["b"], until=0.0), "three": part(lambda _: ["c"])}
    worker = Runs()
    records = device.run_all(device.Schedule(made, PLAN, time.monotonic(), 100.0), [worker])
    assert worker.ran == ["one a", "three c"]
    assert [record["kind"] for record in records] == ["right", "not run", "right"]
    assert device.is_bad(records)


def test_a_part_whose_cases_are_not_to_be_found_is_wrong() -> None:
    def fails(plan: Any) -> list[str]:
        raise RuntimeError("pytest finds no test")

    made = {"one": part(fails), "two": part(lambda plan: ["b"])}
    records = device.run_all(device.Schedule(made, PLAN, time.monotonic(), 100.0), [Runs()])
    assert [(record["part"], record["kind"]) for record in records] == [("one", "wrong"), ("two", "right")]
    assert device.report(records)[:2] == ["1 wrong", "one: (its cases): RuntimeError: pytest finds no test"]


@pytest.mark.parametrize(
    ("kinds", "bad"),
    [
        ([], True),
        (["right", "skipped", "not run"], False),
        (["skipped"], False),
        (["not run"], True),
        (["right", "wrong"], True),
        (["right", "crashed"], True),
    ],
)
def test_the_status_is_that_of_the_worst_case(kinds: list[str], bad: bool) -> None:
    assert device.is_bad([{"part": "one", "kind": kind} for kind in kinds]) == bad


def test_faults_come_first_and_the_table_counts_all() -> None:
    records = [
        {"part": "facts", "name": "Clip", "kind": "right", "detail": "", "found": {"found": "1"}, "took": 1.0},
        {"part": "facts", "name": "Relu", "kind": "right", "detail": "", "found": {"found": "1", "expected": "1"}},
        {"part": "models", "name": "gpt", "kind": "crashed", "detail": "case 0: it hangs"},
        {"part": "models", "name": "mlp", "kind": "wrong", "detail": "ours 1,\n eager 2", "took": 2.6},
        {"part": "models", "name": "bert", "kind": "not run", "detail": ""},
    ]
    assert device.report(records) == [
        "2 wrong",
        "models: gpt: crashed: case 0: it hangs",
        "models: mlp: ours 1, eager 2",
        "",
        "part    cases  right  wrong  crashed  skipped  not run  seconds",
        "facts       2      2      0        0        0        0        1",
        "models      3      0      1        1        0        1        3",
        "",
        "found, where nothing was expected:",
        "Clip: 1",
    ]


def test_lines_of_the_processes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("a warning\n\nanother\n")
    (tmp_path / "2.txt").write_text("a warning\n")
    assert device.said_in(tmp_path) == {"a warning": 2, "another": 1}


# -- a case ------------------------------------------------------------------------------------------------------------


def verdict_of(monkeypatch: pytest.MonkeyPatch, found: Callable[[], dict[str, Any]], plan: Any = PLAN) -> Any:
    monkeypatch.setitem(parts.PARTS, "one", parts.Part(lambda plan: [], lambda name, plan: found(), 1.0))
    return parts.run_case(parts.Job("one", "a", plan))


def test_a_case_has_a_verdict_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdict_of(monkeypatch, lambda: {"ok": True, "apart": 0.5})
    assert (found["kind"], found["detail"], found["found"]) == ("right", "", {"apart": 0.5})
    found = verdict_of(monkeypatch, lambda: {"ok": False, "apart": 0.51234, "n": 2})
    assert (found["kind"], found["detail"]) == ("wrong", "apart 0.512, n 2")
    found = verdict_of(monkeypatch, lambda: {"ok": None, "reason": "no kernel"})
    assert (found["kind"], found["detail"]) == ("skipped", "no kernel")
    found = verdict_of(monkeypatch, lambda: {"ok": 1 / 0 > 1})
    assert (found["kind"], found["detail"]) == ("wrong", "ZeroDivisionError: division by zero")
    assert "1 / 0" in found["found"]["at"]


def test_a_fault_on_the_device_is_the_cases_and_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    found = verdict_of(monkeypatch, lambda: {"ok": True}, parts.Plan("cuda:0", "tiny"))
    assert found["kind"] == "wrong"
    assert found["detail"] == "after it: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert found[ENDS_ITS_PROCESS]


def test_a_unit_is_judged_by_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def verdicts(*kinds: str) -> Any:
        made = [{"kind": kind, "detail": "why", "native": {}, "eager": {}} for kind in kinds]
        monkeypatch.setattr(parts.operator_jobs, "cases_of", lambda job: [lambda one=one: one for one in made])
        found = parts.run_unit("add float32", PLAN)
        return found["ok"], found.get("reason")

    assert verdicts("same", "not comparable") == (True, None)
    assert verdicts("same", "different", "failed") == (False, "different: why")
    assert verdicts("not comparable") == (None, "not comparable: why")
    assert verdicts() == (None, "it has no samples")


def test_the_sample_of_operators_is_fixed_by_its_seed() -> None:
    names = parts.units(PLAN)
    assert len(names) == 5
    assert names == parts.units(PLAN)
    assert names != parts.units(parts.Plan("cpu", "tiny", units=5, seed=1))


def test_marked_tests_are_found_but_for_those_of_other_parts() -> None:
    found = parts.tests_marked(PLAN)
    assert "tests/cuda/test_on_device.py::test_a_model_trains_as_in_eager" in found
    assert not [name for name in found if "a_fact_holds" in name or "check_of_the_benchmark" in name]


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def place() -> Any:
    return places.Place(torch.device("cpu"), "tiny", float("inf"))


@pytest.mark.parametrize(
    "name",
    [
        "gpt, checkpointing",
        "mlp, dropout",
        "mlp, accumulation",
        "bert, varying lengths",
        "mlp, bfloat16",
        "unet, plain",
    ],
)
def test_a_model_trains_as_in_eager(place: Any, name: str) -> None:
    found = models.train(name, place)
    assert found["ok"], found


def test_a_wrong_gradient_is_seen(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile

    def scaled(module: Any, backend: str) -> Any:
        compiled = compile_(module, backend=backend)
        return (lambda *batch: compiled(*batch) * 1.01) if backend == "ort_train" else compiled

    monkeypatch.setattr(torch, "compile", scaled)
    found = models.train("mlp, plain", place)
    assert found["ours"] > 0.005 > found["aot_eager"]
    assert not found["ok"]


def test_the_worst_of_all_tensors_counts() -> None:
    large, small = torch.full((4,), 100.0), torch.full((4,), 1.0)
    assert models.distance([large, small * 1.5], [large, small]) == pytest.approx(0.5)
    assert models.distance([large, small * 1e-6], [large, small * 0]) < 1e-5
    assert models.distance([large * float("nan")], [large]) == float("inf")


def test_batches_vary_as_asked() -> None:
    batch = (torch.zeros(4, 16, dtype=torch.long), torch.zeros(4, 16, dtype=torch.long))

    def shapes(model: str, **given: Any) -> list[list[tuple[int, ...]]]:
        steps = models.batches(model, models.Training(**given), batch)
        return [[tuple(part[0].shape) for part in parts] for parts in steps]

    assert shapes("gpt") == [[(4, 16)]] * 3
    assert shapes("gpt", parts=2) == [[(2, 16), (2, 16)]] * 3
    assert shapes("gpt", varies=True) == [[(4, 16)], [(4, 15)], [(4, 14)]]
    assert shapes("mlp", varies=True) == [[(4, 16)], [(5, 16)], [(6, 16)]]
