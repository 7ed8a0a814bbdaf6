"""A case that dies or hangs costs itself, and no case of another one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import worker_cases
from workers import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(worker_cases.prepare, worker_cases.cases_of, seconds=3.0)
    yield made
    made.stop()


def kinds(worker: Worker, job: str) -> list[str]:
    return [verdict["kind"] for verdict in worker.run(job)]


def test_a_process_serves_all_jobs(worker: Worker) -> None:
    found = [*worker.run("ab"), *worker.run("c")]
    assert [one["kind"] for one in found] == ["a", "b", "c"]
    assert len({one["process"] for one in found}) == 1
    assert {one["prepared"] for one in found} == {"yes"}


def test_a_case_that_dies_costs_itself(worker: Worker) -> None:
    found = worker.run("adb")
    assert [one["kind"] for one in found] == ["a", "crashed", "b"]
    assert found[1]["detail"] == "case 1: the process ended with status 7"
    assert found[0]["process"] != found[2]["process"]
    assert kinds(worker, "c") == ["c"]


def test_a_case_that_hangs_costs_itself(worker: Worker) -> None:
    found = worker.run("ha")
    assert [one["kind"] for one in found] == ["crashed", "a"]
    assert found[0]["detail"] == "case 0: it hangs"


def test_a_case_after_which_nothing_runs_has_its_verdict_and_a_new_process_follows(worker: Worker) -> None:
    found = [*worker.run("alb"), *worker.run("l"), *worker.run("c")]
    assert [one["kind"] for one in found] == ["a", "l", "b", "l", "c"]
    assert found[0]["process"] == found[1]["process"] != found[2]["process"]


def test_a_job_without_cases_and_one_that_cannot_begin_end(worker: Worker) -> None:
    assert kinds(worker, "") == []
    assert worker.run("a?b")[1:] == [
        {"kind": "crashed", "detail": "outside its cases: the process ended with status 1"}
    ]
    assert kinds(worker, "c") == ["c"]


def test_a_process_that_cannot_start_is_said() -> None:
    worker = Worker(worker_cases.fails, worker_cases.cases_of)
    assert kinds(worker, "ab") == ["crashed"]
    worker.stop()


def test_a_case_that_runs_at_the_end_is_no_crash() -> None:
    worker = Worker(worker_cases.prepare, worker_cases.cases_of, end=time.monotonic() + 4)
    begin = time.monotonic()
    found = worker.run("ahb")
    assert [one["kind"] for one in found] in (["a", "not run"], ["not run"])  # the start may take all of it
    assert time.monotonic() - begin < 30
    assert kinds(worker, "a") == ["not run"]
    worker.stop()
