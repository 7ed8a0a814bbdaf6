"""The cache of this process: bounded, and right when threads meet in it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ort_dynamo.cache.memory import MemoryCache

TIMEOUT = 30.0


def start(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    return thread, results


def finish(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


class Making:
    """A make() that says that it began, and returns when it is let go."""

    def __init__(self, value: str) -> None:
        self.value = value
        self.began, self.go = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.go.wait(TIMEOUT)
        return self.value


def unexpected() -> str:
    raise AssertionError("it was there")


def made_anew(cache: MemoryCache[str], key: str) -> str:
    """Make a key's value again in a cache of one entry. A key that is still being made would never come."""
    cache.get_or_build("in its place", lambda: "another")
    thread, found = start(lambda: cache.get_or_build(key, lambda: "again"))
    finish(thread)
    return found[0]


def test_a_key_is_made_once() -> None:
    cache: MemoryCache[str] = MemoryCache()
    assert cache.get_or_build("a", lambda: "A") == "A"
    assert cache.get_or_build("a", unexpected) == "A"
    assert (cache.hits, cache.misses, len(cache)) == (1, 1, 1)


def test_value_without_a_key_is_not_cached() -> None:
    cache: MemoryCache[str] = MemoryCache()
    assert [cache.get_or_build(None, lambda: "A") for _ in range(2)] == ["A", "A"]
    assert (cache.hits, cache.misses, len(cache)) == (0, 0, 0)


def test_the_least_recently_used_goes_first() -> None:
    cache: MemoryCache[str] = MemoryCache(max_entries=2)
    for key in ("a", "b", "a", "c"):
        cache.get_or_build(key, lambda key=key: key)  # type: ignore[misc]
    assert len(cache) == 2
    assert cache.get_or_build("a", unexpected) == "a"
    assert cache.get_or_build("b", lambda: "again") == "again"


def test_bytes_are_bounded_and_counted() -> None:
    cache: MemoryCache[str] = MemoryCache(max_bytes=10, size=len)
    for value in ("aaaa", "bbbb", "cccc"):
        cache.get_or_build(value, lambda value=value: value)  # type: ignore[misc]
    assert (len(cache), cache.nbytes) == (2, 8)
    assert cache.get_or_build("large", lambda: "x" * 11) == "x" * 11
    assert (len(cache), cache.nbytes) == (2, 8)  # it did not drive the others out
    cache.clear()
    assert cache.nbytes == 0


def test_value_that_keep_rejects_is_built_for_each_caller() -> None:
    cache: MemoryCache[str] = MemoryCache(keep=lambda value: value != "mine")
    assert cache.get_or_build("a", lambda: "mine") == "mine"
    assert cache.get_or_build("a", lambda: "shared") == "shared"
    assert cache.get_or_build("a", unexpected) == "shared"


def test_threads_that_ask_for_one_key_get_one_value() -> None:
    cache: MemoryCache[str] = MemoryCache(max_entries=1)
    making, barrier = Making("A"), threading.Barrier(4)
    first, made = start(lambda: cache.get_or_build("a", making))
    assert making.began.wait(TIMEOUT)

    def second() -> str:
        barrier.wait(TIMEOUT)
        return cache.get_or_build("a", unexpected)

    others = [start(second) for _ in range(3)]
    barrier.wait(TIMEOUT)
    making.go.set()
    finish(first, *(thread for thread, _ in others))
    assert made == ["A"]
    assert [found for _, found in others] == [["A"]] * 3
    assert made_anew(cache, "a") == "again"


def test_another_key_does_not_wait() -> None:
    cache: MemoryCache[str] = MemoryCache()
    making = Making("A")
    thread, _ = start(lambda: cache.get_or_build("a", making))
    assert making.began.wait(TIMEOUT)
    assert cache.get_or_build("b", lambda: "B") == "B"
    making.go.set()
    finish(thread)


def test_clear_discards_a_build_in_progress() -> None:
    cache: MemoryCache[str] = MemoryCache()
    old, new = Making("old"), Making("new")
    first, made = start(lambda: cache.get_or_build("a", old))
    assert old.began.wait(TIMEOUT)
    cache.clear()
    second, remade = start(lambda: cache.get_or_build("a", new))
    assert new.began.wait(TIMEOUT)  # it does not wait for the old one
    old.go.set()
    finish(first)
    assert made == ["old"]
    assert len(cache) == 0
    new.go.set()
    finish(second)
    assert remade == ["new"]
    assert cache.get_or_build("a", unexpected) == "new"


def test_clear_leaves_nothing_behind() -> None:
    cache: MemoryCache[str] = MemoryCache(max_entries=1)
    making = Making("A")
    thread, _ = start(lambda: cache.get_or_build("a", making))
    assert making.began.wait(TIMEOUT)
    cache.clear()
    making.go.set()
    finish(thread)
    assert (len(cache), cache.nbytes) == (0, 0)
    assert made_anew(cache, "a") == "again"


def test_failed_build_is_not_cached_and_waiters_build_themselves() -> None:
    cache: MemoryCache[str] = MemoryCache(max_entries=1)
    making = Making("")
    errors: list[str] = []

    def fail() -> str:
        making()
        raise ValueError("no")

    def first() -> None:
        with pytest.raises(ValueError, match="no"):
            cache.get_or_build("a", fail)
        errors.append("no")

    failing, _ = start(first)
    assert making.began.wait(TIMEOUT)
    waiting, found = start(lambda: cache.get_or_build("a", lambda: "A"))
    making.go.set()
    finish(failing, waiting)
    assert errors == ["no"]
    assert found == ["A"]
    assert len(cache) == 1
    assert made_anew(cache, "a") == "again"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_it_lacks() -> None:
    cache: MemoryCache[str] = MemoryCache()
    cache.get_or_build("kept", lambda: "K")
    making = Making("A")
    thread, _ = start(lambda: cache.get_or_build("a", making))
    assert making.began.wait(TIMEOUT)
    child = os.fork()
    if not child:
        signal.alarm(round(TIMEOUT))  # ends a child that waits
        found = None
        try:
            found = cache.get_or_build("a", lambda: "mine"), cache.get_or_build("kept", unexpected)
        finally:
            os._exit(found != ("mine", "K"))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    making.go.set()
    finish(thread)
    assert cache.get_or_build("a", unexpected) == "A"  # the parent's
