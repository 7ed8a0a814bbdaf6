"""Ranks that compile the same graph: one builds, the others read, and all of them decide the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt import batches, compiled, loss_of, make
from ranks import RankFailedError, Ranks, describe
from torch import distributed, nn
from torch._dynamo.utils import counters

import ort_dynamo.cache.open_island
from ort_dynamo.cache.disk import COUNTS
from ort_dynamo.errors import RanksDisagreeError
from ort_dynamo.report.record import RECORDS
from ort_dynamo.torch_internals.tracing.dynamo import raised_by_backend


def one_step(**options: Any) -> list[str]:
    """Compile and run one step of the GPT; where each island came from."""
    model = make()
    tokens, labels = next(batches())
    loss_of(compiled(model, **options)(tokens), labels).backward()
    return [island.source for record in RECORDS for graph in record.graphs for island in graph.islands]


def together(options: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
    distributed.barrier()
    return one_step(**options), dict(COUNTS)


def test_one_of_four_ranks_builds_and_three_read(tmp_path: Path) -> None:
    folder = tmp_path / "compiled"
    ranks = Ranks(tmp_path, {"ORT_DYNAMO_CACHE": "1", "ORT_DYNAMO_CACHE_DIR": str(folder)})
    found = ranks.run(together, 4, {})
    sources = [source for sources, _ in found for source in sources]
    assert (sources.count("built"), sources.count("disk")) == (2, 6), found  # two islands, forward and backward
    assert not list(folder.glob(".*"))


def killed_while_it_builds(began: str) -> list[str]:
    """The rank that builds first is killed in the middle of it."""
    build = ort_dynamo.cache.open_island.build_island

    def build_and_wait(*args: Any) -> Any:
        if os.path.exists(began):
            return build(*args)
        Path(began).write_text(str(distributed.get_rank()))
        time.sleep(600)
        raise AssertionError("it was not killed")

    ort_dynamo.cache.open_island.build_island = build_and_wait
    return one_step()


def test_a_rank_that_is_killed_while_it_builds_blocks_nobody(tmp_path: Path) -> None:
    began = tmp_path / "began"
    ranks = Ranks(tmp_path, {"ORT_DYNAMO_CACHE": "1", "ORT_DYNAMO_CACHE_DIR": str(tmp_path / "compiled")})

    def kill(processes: Sequence[Any]) -> None:
        end = time.monotonic() + 60
        while not (began.exists() and began.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(processes[int(began.read_text())].pid, signal.SIGKILL)

    results = ranks.outcomes(killed_while_it_builds, 3, str(began), watch=kill)
    killed = int(began.read_text())
    others = [result for rank, result in enumerate(results) if rank != killed]
    assert results[killed].exitcode == -signal.SIGKILL
    assert [len(result.value or ()) for result in others] == [2, 2], describe(results)
    assert [*others[0].value, *others[1].value].count("built") == 2


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def different_options(compare: bool) -> str:
    """Rank 1 asks for another placement; rank 0 is first."""
    rank = distributed.get_rank()
    options = {"placement": ("fastest", "onnxruntime")[rank], "debug": {"compare_ranks": compare}}
    model, x = net(), torch.randn(2, 3, 8, 8)
    error: BaseException | None = None
    for turn in range(2):
        if turn == rank:
            try:
                torch.compile(model, backend="ort_train", options=options)(x).sum().backward()
            except Exception as raised:
                error = raised_by_backend(raised)
        distributed.barrier()
    if error is None:
        return ""
    assert isinstance(error, RanksDisagreeError), error
    return str(error)


def test_ranks_that_place_the_same_graph_differently_are_told_so(ranks: Ranks) -> None:
    first, second = ranks.run(different_options, 2, True)
    assert first == ""
    assert "rank 1 (" in second
    assert "rank 0 (" in second
    assert "in torch by choice, aten.convolution.default" in second
    assert "compare_ranks" in second


def test_ranks_may_differ_where_the_program_says_so(ranks: Ranks) -> None:
    assert ranks.run(different_options, 2, False) == ["", ""]


def different_threads(compare: bool) -> str | dict[str, int]:
    """Rank 0 has one thread, by which torch convolves and a session multiplies; the four of rank 1 would contend."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    hidden = nn.Linear(16 * 30 * 30, 512), nn.GELU(), nn.Linear(512, 3)
    model, x = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), *hidden), torch.randn(8, 1, 32, 32)
    options = {"threads": 1 + 3 * rank, "debug": {"compare_ranks": compare}}
    for turn in range(2):
        if turn == rank:
            torch.compile(model, backend="ort_train", options=options)(x).sum().backward()
        distributed.barrier()
    return {name: counters["ort_train"][name] for name in ("native_nodes", "chosen_nodes")}


def test_ranks_of_different_numbers_of_threads_place_the_same_graph_alike(ranks: Ranks) -> None:
    first, second = ranks.run(different_threads, 2, True)
    assert first == second
    first, second = ranks.run(different_threads, 2, False)
    assert first != second


def other_graphs() -> list[str]:
    """Compile another graph on each rank, as pipeline stages do, and then one graph on all ranks."""
    rank = distributed.get_rank()
    torch.compile(nn.Linear(4 + rank, 4), backend="ort_train")(torch.ones(1, 4 + rank)).sum().backward()
    if rank == 0:
        torch.compile(nn.Linear(9, 9), backend="ort_train")(torch.ones(1, 9))
    model = make()
    tokens, _ = next(batches())
    # Twice, decided otherwise the second time by all of them; and a rank that comes later is not missed.
    for options in ({}, {"debug": {"fuse": False}}):
        torch._dynamo.reset()
        compiled(model, **options)(tokens)
        time.sleep(0.2 * rank)
    distributed.barrier()
    return []


def test_ranks_that_compile_other_graphs_are_not_compared_and_nobody_waits(ranks: Ranks) -> None:
    ranks.run(other_graphs, 3, timeout=60)


def test_a_failing_rank_s_traceback_is_in_the_error(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)of ranks \[1\].*ZeroDivisionError"):
        ranks.run(fail_on_rank_1, 2, timeout=60)


def fail_on_rank_1() -> None:
    _ = 1 // (1 - distributed.get_rank())
