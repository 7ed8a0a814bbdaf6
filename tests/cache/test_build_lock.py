"""One process builds an entry, others wait, and none waits for a process that has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from ort_dynamo.cache import build_lock as module
from ort_dynamo.cache.build_lock import build_lock

pytest.importorskip("fcntl")

SOON = 20.0


def hold(lock: Path, began: Path) -> None:
    with build_lock(lock, lambda: False):
        began.touch()
        time.sleep(600)


def wait_for(path: Path) -> None:
    end = time.monotonic() + SOON
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.01)


def in_thread(lock: Path, made: Path) -> tuple[threading.Thread, list[bool]]:
    """Start another maker; the list gets whether the thing was there when its turn came."""
    found: list[bool] = []

    def make() -> None:
        with build_lock(lock, made.exists):
            found.append(made.exists())

    thread = threading.Thread(target=make)
    thread.start()
    return thread, found


def test_waiting_threads_find_the_built_entry(tmp_path: Path) -> None:
    lock, made = tmp_path / "lock", tmp_path / "made"
    with build_lock(lock, made.exists):
        others = [in_thread(lock, made) for _ in range(3)]
        time.sleep(0.1)
        assert all(not found for _, found in others)
        made.touch()
        for thread, _ in others:
            thread.join(SOON)
    assert [found for _, found in others] == [[True]] * 3
    assert not lock.exists()


def test_a_maker_that_made_nothing_lets_all_others_go_on_at_once(tmp_path: Path) -> None:
    lock, made = tmp_path / "lock", tmp_path / "made"
    together = threading.Barrier(3, timeout=SOON)

    def make() -> None:
        with build_lock(lock, made.exists):
            together.wait()  # reached by three only if none of them waits for another

    with build_lock(lock, made.exists):
        threads = [threading.Thread(target=make) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join(SOON)
    assert not together.broken


def test_nobody_waits_for_a_maker_that_was_killed(tmp_path: Path) -> None:
    lock, began = tmp_path / "lock", tmp_path / "began"
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(lock, began), daemon=True)
    process.start()
    wait_for(began)
    thread, found = in_thread(lock, tmp_path / "made")
    time.sleep(0.1)
    assert not found
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    thread.join(SOON)
    assert found == [False]


def test_nobody_waits_long_for_a_maker_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.2)
    lock = tmp_path / "lock"
    with build_lock(lock, lambda: False):
        thread, found = in_thread(lock, tmp_path / "made")
        thread.join(SOON)
        assert found == [False]
    assert not lock.exists()


def test_a_lock_that_was_left_behind_is_nobody_s(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    thread, found = in_thread(lock, tmp_path / "made")
    thread.join(SOON)
    assert found == [False]
    assert not lock.exists()


def test_exception_releases_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with pytest.raises(ValueError, match="the compile failed"), build_lock(lock, lambda: False):
        raise ValueError("the compile failed")
    assert not lock.exists()
