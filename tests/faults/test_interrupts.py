"""An interrupt at any moment leaves nothing behind: the next step is right, and no lock blocks."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from children import ran
from interrupting import Interrupter

from ort_dynamo.cache.build_lock import build_lock
from ort_dynamo.cache.memory import MemoryCache

COMMON = """
import gc, json, os, random, signal, sys, threading
import torch
from torch.nn import functional as F
from ort_dynamo.cache.folder import CacheFolder
from ort_dynamo.cache.open_island import CACHE
from interrupting import Interrupter

torch.set_num_threads(1)
folder, seed, count = sys.argv[1], *map(int, sys.argv[2:])
moments = random.Random(seed)


class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(4, width), torch.nn.Linear(width, 1)

    def forward(self, x):
        return self.down(F.dropout(F.gelu(self.up(x)), 0.5)).sum()


def step(run, model):
    model.zero_grad()
    torch.manual_seed(1)
    loss = run(torch.ones(3, 4))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def check(compiled, model, where):
    try:
        torch.testing.assert_close(step(compiled, model), step(model, model))
    except BaseException as error:
        raise AssertionError(f"after an interrupt at {where}") from error
    assert not CACHE._making, where
    left = [name for name in os.listdir(folder) if name.endswith(".lock")]
    for name in left:  # a lock that somebody holds would make the next compile wait
        with open(os.path.join(folder, name)) as file:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(os.path.join(folder, name))


def fresh(width):
    torch._dynamo.reset()
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    model = Model(width)
    return torch.compile(model, backend="ort_train"), model


os.makedirs(folder, exist_ok=True)
compiled, model = fresh(4)
"""

BY_PLACES = (
    COMMON
    + """
step(compiled, model)
compiled, model = fresh(4)
counted = Interrupter(0, "ort_dynamo")  # of a compile that imports nothing
counted.run(lambda: step(compiled, model))
places, done = [], 0
for _ in range(count):
    compiled, model = fresh(4)
    interrupter = Interrupter(moments.randint(1, counted.seen), "ort_dynamo")
    if interrupter.run(lambda: step(compiled, model)):
        done += 1
        places.append(f"{interrupter.where} of {interrupter.at} {interrupter.seen}")
    check(compiled, model, interrupter.where)
print(json.dumps({"interrupted": count - done, "places": places}))
"""
)

BY_SIGNALS = (
    COMMON
    + """
import time

signal.signal(signal.SIGALRM, signal.default_int_handler)  # as SIGINT, whose clock is the process's own
begin = time.perf_counter()
step(compiled, model)
whole = time.perf_counter() - begin
interrupted = swallowed = 0
for number in range(count):
    compiled, model = fresh(4 + number % 2)
    if number % 2:
        step(compiled, model)  # so that the interrupt meets steps alone
    try:
        signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.001, 0.01 if number % 2 else whole))
        while signal.getitimer(signal.ITIMER_REAL)[0]:
            step(compiled, model)
        swallowed += 1  # Python drops an error that is raised in a destructor or in the callback of a weak reference
    except BaseException as error:  # torch wraps an interrupt in its own errors at some places
        interrupted += 1
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0, error
    check(compiled, model, "a signal")
assert interrupted > count // 2
print(json.dumps({"interrupted": interrupted + swallowed}))
"""
)


@pytest.mark.parametrize("program", [BY_PLACES, BY_SIGNALS], ids=["places", "signals"])
@pytest.mark.parametrize(("seed", "count"), [(0, 8), pytest.param(1, 300, marks=pytest.mark.slow)])
def test_a_step_after_an_interrupted_one_is_right(tmp_path: Path, program: str, seed: int, count: int) -> None:
    folder = str(tmp_path / "cache")
    out, _ = ran(
        program,
        folder,
        str(seed),
        str(count),
        ORT_DYNAMO_CACHE="1",
        ORT_DYNAMO_CACHE_DIR=folder,
        PYTHONPATH=f"{Path(__file__).parent}:{Path(__file__).parents[2]}",
    )
    found = json.loads(out.splitlines()[-1])
    assert found["interrupted"] == count, found


def test_a_key_whose_maker_was_interrupted_is_made_by_the_next() -> None:
    at = 0
    while True:
        at += 1
        cache: MemoryCache[int] = MemoryCache()
        interrupter = Interrupter(at, "cache/memory.py")
        whole = interrupter.run(lambda: cache.get_or_build("key", lambda: 1))  # noqa: B023 - called at once
        assert not cache._lock.locked(), interrupter.where
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append(cache.get_or_build("key", lambda: 2)), daemon=True)  # noqa: B023
        other.start()
        other.join(10)
        assert found in ([1], [2]), interrupter.where
        if whole:
            break
    assert at > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the collector closes the file
def test_a_lock_whose_holder_was_interrupted_is_free(tmp_path: Path) -> None:
    import fcntl

    lock = tmp_path / "key.lock"

    def hold() -> None:
        with build_lock(lock, lambda: False):
            pass

    at, whole = 0, False
    while not whole:
        at += 1
        interrupter = Interrupter(at, "cache/build_lock.py")
        whole = interrupter.run(hold)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if somebody holds it
        lock.unlink()
    assert at > 10
