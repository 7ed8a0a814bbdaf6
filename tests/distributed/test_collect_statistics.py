"""Statistics of a graph with a collective, whose result is there only after the wait."""

from __future__ import annotations

import time

import torch
from ranks import Ranks
from torch import distributed
from torch.distributed._functional_collectives import all_gather_tensor

from ort_dynamo import collect_statistics


def late_rank() -> list[tuple[str, float | None]]:
    """Gather a tensor whose numbers are above zero, in rank 0 a second before rank 1."""
    rank = distributed.get_rank()
    compiled = torch.compile(lambda x: all_gather_tensor(x + 1, 0, distributed.group.WORLD) * 2, backend="ort_train")
    x = torch.full((4,), float(rank))
    compiled(x)
    with collect_statistics() as run:
        distributed.barrier()
        time.sleep(rank)
        compiled(x)
    return [(one.overload, one.min) for one in run.statistics]


def test_the_result_of_a_collective_is_read_after_the_wait(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(late_rank, 2)):
        names = ["input", "aten.add.Tensor", "_c10d_functional.wait_tensor.default", "aten.mul.Tensor"]
        assert found == list(zip(names, [rank, rank + 1, 1, 2], strict=True))
