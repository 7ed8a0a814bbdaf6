"""Options, fixtures and the closing table of the benchmarks; docs/internals/benchmarks.md says how to read them."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from bench.contestants import BACKENDS, SUBJECT, why_absent
from bench.interleaved import run_interleaved
from bench.results import Compare, Result, Row, Rows, format_rows, format_table
from bench.workloads import SIZES, Size
from ort_dynamo.runtime.installed.capabilities import installed_runtime

_RESULTS = pytest.StashKey[list[Result]]()

_ROWS = pytest.StashKey[list[Row]]()

os.environ["ORT_DYNAMO_CACHE"] = "0"  # no benchmark finds another's graphs; bench_second_process has its own cache

_LOAD = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ort_dynamo benchmarks")
    group.addoption("--bench-size", choices=SIZES, default="small", help="size of the models (default: small)")
    group.addoption("--bench-rounds", type=int, help="rounds of each benchmark (default: by size and question)")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RESULTS] = []
    config.stash[_ROWS] = []
    config.stash[_LOAD] = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    # torch warns that its caches are off; bench_first_step turns them off.
    config.addinivalue_line("filterwarnings", "ignore:.* force disabled by torch.compiler.config:UserWarning")
    # A benchmark that fails or is skipped before it measures has said why.
    config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used at all in this test")


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    runtime = installed_runtime()
    machine_info["load_before"] = config.stash[_LOAD]
    machine_info["torch"] = torch.__version__
    machine_info["torch_threads"] = torch.get_num_threads()
    machine_info["torch_cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    machine_info["onnxruntime"] = f"{runtime.package} {runtime.version}"
    machine_info["transformers"] = importlib.metadata.version("transformers")


@pytest.hookimpl(trylast=True)  # below pytest-benchmark's table of times
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results, rows = config.stash[_RESULTS], config.stash[_ROWS]
    if not results and not rows:
        return
    runtime = installed_runtime()
    terminalreporter.section(
        f"ratios, {config.getoption('--bench-size')} models, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {runtime.package} {runtime.version}"
    )
    terminalreporter.line("median [quartiles] over the rounds; below 1 the first of the two is faster")
    if (load := config.stash[_LOAD]) > 0.5:
        terminalreporter.line(
            f"the machine was busy (load average {load:.1f} before the run): do not trust these", red=True
        )
    for question in dict.fromkeys(result.question for result in results):
        terminalreporter.line("")
        terminalreporter.line(question, bold=True)
        for line in format_table([result for result in results if result.question == question]):
            terminalreporter.line(line)
    for question, cases in itertools.groupby(rows, key=lambda row: row.question):
        terminalreporter.line("")
        terminalreporter.line(question, bold=True)
        for line in format_rows(list(cases)):
            terminalreporter.line(line)


@pytest.fixture
def size(pytestconfig: pytest.Config) -> Size:
    """--bench-size."""
    chosen: Size = pytestconfig.getoption("--bench-size")
    return chosen


@pytest.fixture(scope="session")
def backends() -> tuple[str, ...]:
    """The contestants that can run here."""
    return tuple(backend for backend in BACKENDS if why_absent(backend) is None)


@pytest.fixture(autouse=True)
def cold_start() -> Iterator[None]:
    """No benchmark sees another's compiled graphs."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def rows(pytestconfig: pytest.Config) -> Rows:
    """Keeps a row for the closing table."""
    return lambda question, case, cells: pytestconfig.stash[_ROWS].append(Row(question, case, cells))


@pytest.fixture
def compare(benchmark: Any, pytestconfig: pytest.Config) -> Compare:
    """Measures contestants and keeps the result for the JSON and the table."""

    def measure(
        question: str,
        case: str,
        contestants: Mapping[str, Callable[[], object]],
        rounds: int,
        calls: int = 1,
        worst_first: bool = False,
    ) -> None:
        rounds = pytestconfig.getoption("--bench-rounds") or rounds
        timings = run_interleaved(benchmark, contestants, SUBJECT, rounds)
        compiled = counters[SUBJECT]
        nodes = {"native": compiled["native_nodes"], "eager": compiled["eager_nodes"]}
        absent = {backend: reason for backend in BACKENDS if (reason := why_absent(backend))}
        result = Result(question, case, timings, calls, nodes, absent, worst_first)
        benchmark.extra_info.update(result.as_json(), size=pytestconfig.getoption("--bench-size"))
        pytestconfig.stash[_RESULTS].append(result)

    return measure
