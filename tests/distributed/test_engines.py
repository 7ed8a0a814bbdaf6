"""Four gloo ranks train the GPT by each of torch's engines: as one process does, and without a node in eager."""

from __future__ import annotations

import pytest
import torch
from engines import ENGINES, train
from gpt import STEPS, alone
from ranks import Ranks

from ort_dynamo.testing import assert_close

FEWER_STEPS = {"dtensor_data_parallel": 3}
"""DTensors in eager, as the optimizer has them there, take most of a second for a step."""

IN_GRAPH = {"tensor_parallel", "sequence_parallel", "fsdp2_tp"}
"""Engines whose collectives are in the graph; those of the others are in hooks, outside."""


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_are_those_of_one_process_on_the_joined_batch(ranks: Ranks, engine: str) -> None:
    steps = FEWER_STEPS.get(engine, STEPS)
    found = ranks.run(train, 4, engine, 0.0, False, steps)
    expected = torch.tensor(alone(steps))
    for rank, one in enumerate(found):
        assert_close(torch.tensor(one.losses), expected, f"rank {rank}'s losses")
        assert one.counts["native_nodes"] > 0
        assert one.eager == {}
        assert bool(one.collectives) == (engine in IN_GRAPH), one.collectives
        assert all("c10d_functional" in name for name in one.collectives)


@pytest.mark.parametrize(
    "engine",
    ["ddp_outside", "fsdp2_block_by_block", "tensor_parallel", "gpipe"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("zero1", "fsdp2", "fsdp2_tp", "one_f_one_b")],
)
def test_dropout_draws_what_it_draws_in_eager(ranks: Ranks, engine: str) -> None:
    mine, theirs = (ranks.run(train, 4, engine, 0.2, eager, 6) for eager in (False, True))
    for rank, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert_close(torch.tensor(one.losses), torch.tensor(other.losses), f"rank {rank}'s losses")
        assert one.eager == {}
    assert_close(torch.tensor(mine[0].losses).isfinite().all(), torch.tensor(True), "losses")
