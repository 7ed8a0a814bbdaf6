"""Tests of a rank that fails, dies or hangs: the errors of the others, and their time."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
from engines import share
from gpt import adam, batches, compiled, loss_of, make
from ranks import Ranks, describe
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import ort_dynamo.cache.open_island

TIMEOUT = 10.0


def endless(what: str) -> None:
    """Train by DDP until something stops it; `what` names the failure of rank 1."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model = make()
    if rank == 1 and what == "compile":

        def refuse(*_: Any) -> Any:
            raise MemoryError("no room for a session")

        ort_dynamo.cache.open_island.build_island = refuse
    net, optimizer = DistributedDataParallel(compiled(model, cache=False)), adam(model.parameters())
    while True:
        for step, (tokens, labels) in enumerate(batches()):
            optimizer.zero_grad()
            loss_of(net(share(tokens, rank, world)), share(labels, rank, world)).backward()
            optimizer.step()
            if rank == 1 and step == 3 and what == "raise":
                raise ValueError("rank 1 has had enough")
            if rank == 1 and step == 3 and what == "hang":
                time.sleep(600)


@pytest.mark.parametrize("what", ["compile", "raise", "hang"])
def test_the_others_end_within_the_timeout_of_their_group(ranks: Ranks, what: str) -> None:
    patience = 20 + 2 * TIMEOUT  # a rank that hangs is killed then
    results = ranks.outcomes(endless, 2, what, timeout=patience, environment={"GROUP_TIMEOUT": str(TIMEOUT)})
    assert results[0].exitcode == 1, describe(results)
    assert "RuntimeError" in results[0].error or "DistBackendError" in results[0].error, results[0].error
    assert results[0].seconds < patience
    said = {"compile": "no room for a session", "raise": "rank 1 has had enough", "hang": "sleep"}[what]
    assert said in results[1].error or what == "hang"


@pytest.mark.parametrize(
    "moment", [pytest.param(n, marks=[] if n in (4, 11) else [pytest.mark.slow]) for n in range(20)]
)
def test_a_rank_that_is_killed_hangs_nobody(ranks: Ranks, moment: int) -> None:
    draw = random.Random(moment)
    victim, after = draw.randrange(3), draw.random() * 6

    def kill(processes: Sequence[Any]) -> None:
        time.sleep(after)
        os.kill(processes[victim].pid, signal.SIGKILL)

    results = ranks.outcomes(endless, 3, "", timeout=60, environment={"GROUP_TIMEOUT": str(TIMEOUT)}, watch=kill)
    assert results[victim].exitcode == -signal.SIGKILL
    for rank, result in enumerate(results):
        if rank != victim:
            assert result.exitcode == 1, describe(results)
            assert "Error" in result.error
            assert result.seconds < after + 10 + 2 * TIMEOUT
