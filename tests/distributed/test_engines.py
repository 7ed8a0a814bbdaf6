"""Four gloo ranks train the GPT by each of torch's engines: as one process does, and without a node in eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import ENGINES, pipeline, train
from gpt import STEPS, alone, compiled
from islands import row
from ranks import Ranks
from torch import distributed
from torch.distributed.pipelining import ScheduleGPipe

from ort_dynamo.testing import assert_close

PAGE = Path(__file__).parents[2] / "docs/internals/engines.md"

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
    assert row(engine, found[0]) in PAGE.read_text().splitlines(), "the table of docs/internals/engines.md"


@pytest.mark.parametrize(
    "engine",
    ["ddp_outside", "fsdp2_block_by_block", "tensor_parallel", "gpipe"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("zero1", "fsdp2", "fsdp2_tp", "one_f_one_b")],
)
def test_dropout_masks_equal_eagers(ranks: Ranks, engine: str) -> None:
    mine, theirs = (ranks.run(train, 4, engine, 0.2, eager, 6) for eager in (False, True))
    for rank, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert_close(torch.tensor(one.losses), torch.tensor(other.losses), f"rank {rank}'s losses")
        assert one.eager == {}
    assert_close(torch.tensor(mine[0].losses).isfinite().all(), torch.tensor(True), "losses")


def uneven(eager: bool) -> str:
    """Cut a batch of 8 into 3 microbatches; give the error of the rank, or no text."""
    try:
        pipeline(ScheduleGPipe, 0.0, (lambda module: module) if eager else compiled, 1, microbatches=3)
    except Exception as error:
        return f"{type(error).__name__}: {error}" if distributed.get_rank() else type(error).__name__
    return ""


def test_an_uneven_last_microbatch_is_refused_as_in_eager(ranks: Ranks) -> None:
    """A stage of torch receives into buffers of the first microbatch's size, compiled or not."""
    mine, theirs = (ranks.run(uneven, 2, eager) for eager in (False, True))
    assert mine == theirs
    assert "to match target batch_size (32)" in mine[1]
