"""Fixtures of all tests: no compiled graphs, counters at zero, and no lowering by facts that no key has."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch._dynamo import guards
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ort_dynamo.backend import ort_train
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.testing import patch_facts
from ort_dynamo.torch_internals.sizes import size_guards

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; threads that spin in each of them would wait for one another.
    torch.set_num_threads(1)


# Tests run without the disk cache, so that each compiles; tests of stored graphs set a folder of their own.
os.environ.setdefault("ORT_DYNAMO_CACHE", "0")

# A compile makes hundreds of thousands of objects that stay, and CPython would search them all every few hundred
# allocations, and Dynamo after each compile: a tenth of the suite's time.
gc.set_threshold(50_000, 20, 100)
torch._dynamo.config.run_gc_after_compile = False

if "TORCH_TRACE" not in os.environ:
    # pytest has handlers on each logger that does not propagate, and for them torch writes its trace of each compile.
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True

TESTS = Path(__file__).resolve().parent
OPERATORS = (
    TESTS / "lowering" / "ops",
    TESTS / "opinfo",
    *(
        TESTS / "cuda" / f"test_{name}.py"
        for name in ("cuda_forms", "integer_forms", "kernel_facts", "operators_on_cuda")
    ),
)
"""Folders and files with tests of single operators."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--operators", metavar="K[,K…]/N", help="of the tests of single operators, run these of N parts")
    parser.addoption("--others", metavar="K[,K…]/N", help="of the other tests, run these of N parts")
    parser.addoption(
        "--others-of", action="append", default=[], metavar="K[,K…]/N:PATH", help="the same for a folder or a file"
    )


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Make no tests of a function that is slow where none such run: 35 000 take each worker half its collection."""
    if not isinstance(obj, FunctionType) or collector.config.getoption("markexpr") != "not slow":
        return None
    return [] if any(mark.name == "slow" for mark in getattr(obj, "pytestmark", ())) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are of another part, by their names and so always the same ones."""
    operators = _part("--operators", config.getoption("--operators"))
    others = _part("--others", config.getoption("--others"))
    others_of = {}
    for asked in config.getoption("--others-of"):
        part, _, name = asked.partition(":")
        place = TESTS.parent / name
        if not place.exists():
            raise pytest.UsageError(f"--others-of={asked}: there is no {place}")
        others_of[place] = _part("--others-of", part)

    @functools.cache  # tens of thousands of tests are in a few hundred files
    def wanted(file: Path) -> tuple[set[int], int]:
        places = (file, *file.parents)
        if any(place in places for place in OPERATORS):
            return operators
        return next((others_of[place] for place in places if place in others_of), others)

    left_out: set[pytest.Item] = set()
    for item in items:
        chosen, parts = wanted(item.path)
        if zlib.crc32(item.nodeid.encode()) % parts + 1 not in chosen:
            left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Keep later searches for garbage from the million objects of imports and collected tests: a second for each."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind says at the end what was not freed


def _part(name: str, asked: str | None) -> tuple[set[int], int]:
    asked = asked or "1/1"
    chosen, _, parts = asked.partition("/")
    numbers = chosen.split(",")
    if not all(one.isdecimal() and parts.isdecimal() and 1 <= int(one) <= int(parts) for one in numbers):
        raise pytest.UsageError(f"{name}={asked}: K/N or K,K/N, with each K from 1 to N")
    return set(map(int, numbers)), int(parts)


@pytest.fixture(autouse=True)
def same_logger() -> Iterator[None]:
    logger = logging.getLogger("orttraining")  # an ORTModule sets its level
    level, disabled = logger.level, logger.disabled
    yield
    logger.setLevel(level)
    logger.disabled = disabled


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    ort_train.reset()  # torch does not call it again if a function compiles after an earlier reset
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def why_no_cuda() -> str | None:
    """Give the reason why tests marked `cuda` cannot run; those tests find a provider that fails to load."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    runtime = installed_runtime()
    if "CUDAExecutionProvider" not in onnxruntime().get_available_providers():
        return f"{runtime.package} {runtime.version} has no CUDAExecutionProvider"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and (reason := why_no_cuda()):
        pytest.skip(reason)


@pytest.fixture(autouse=True, scope="session")
def unmeasured_guards() -> None:
    """Keep Dynamo from timing its guards after each compile: it flushes the CPU's caches first, a quarter of a test."""
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(autouse=True)
def lowered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run lowerings in their tests, also where a program would have torch run the operator by choice.

    The marker `default_placement` leaves placement on.
    """
    if request.node.get_closest_marker("default_placement"):
        return
    if any(folder in request.path.parents for folder in (*OPERATORS, TESTS / "lowering", TESTS / "architectures")):
        patch_facts(monkeypatch, convolves_slower_than_torch=False, has_slower_operators=False)


@pytest.fixture(autouse=True)
def complete_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error to lower a graph by a fact about its sizes that its nodes did not record for the key."""
    evaluate = ShapeEnv.evaluate_expr

    def watched(self: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        result = evaluate(self, expr, *args, **kwargs)
        if size_guards.is_watched() and expr.free_symbols:
            raise AssertionError(f"a lowering asked torch itself, not torch_internals/sizes/symbols.py, for {expr}")
        return result

    monkeypatch.setattr(size_guards, "strict", True)
    monkeypatch.setattr(ShapeEnv, "evaluate_expr", watched)
