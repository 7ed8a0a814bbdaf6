"""Section 1.7 of ORTModule's reference: samplers that balance the cost of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ort_dynamo.training.utils.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler


def samplers(**options: Any) -> list[LoadBalancingDistributedSampler]:
    generator = torch.Generator().manual_seed(7)
    dataset = [(torch.zeros(1), int(n)) for n in torch.randint(1, 100, (50,), generator=generator)]
    return [
        LoadBalancingDistributedSampler(
            dataset, complexity_fn=lambda sample: sample[1], world_size=3, rank=rank, **options
        )
        for rank in range(3)
    ]


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"group_size": 10}, {"drop_last": True}, {"random_level": 0.5}]
)
def test_the_sampler_deals_out_samples_of_like_cost(options: dict[str, Any]) -> None:
    dealt = samplers(**options)
    indices = [list(one) for one in dealt]
    assert {len(one) for one in indices} == {len(dealt[0])} == {16 if options.get("drop_last") else 17}
    everything = [index for one in indices for index in one]
    assert len(set(everything)) == (48 if options.get("drop_last") else 50)
    costs = np.array([[dealt[0].dataset[index][1] for index in one] for one in indices])
    if not options.get("random_level"):
        assert np.median(np.ptp(costs, axis=0)) <= (30 if "group_size" in options else 5)
    again = samplers(**options)
    assert [list(one) for one in again] == indices
    for one in again:
        one.set_epoch(1)
    assert ([list(one) for one in again] == indices) == (options.get("shuffle") is False)


def test_sampler_errors() -> None:
    for options in ({"rank": 3}, {"rank": -1}):
        with pytest.raises(ValueError, match=r"rank should be in the interval \[0, 2\]"):
            LoadBalancingDistributedSampler([1], complexity_fn=int, world_size=3, **options)
    with pytest.raises(ValueError, match="Invalid random level 2"):
        LoadBalancingDistributedSampler([1], complexity_fn=int, world_size=1, rank=0, random_level=2)
    with pytest.raises(ValueError, match=r"sampler should be of LoadBalancingDistributedSampler type."):
        LoadBalancingDistributedBatchSampler([1], batch_fn=list)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="drop_last of sampler should be False"):
        LoadBalancingDistributedBatchSampler(samplers(drop_last=True)[0], batch_fn=list)


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_batch_sampler_gives_each_process_as_many_batches(drop_last: bool) -> None:
    def batches(indices: list[int]) -> list[list[int]]:
        cut = 1 + indices[0] % 5
        return [indices[begin : begin + cut] for begin in range(0, len(indices), cut)]

    made = [LoadBalancingDistributedBatchSampler(one, batches, drop_last) for one in samplers()]
    assert len({len(one) for one in made}) == 1
    assert {len(list(one)) for one in made} == {len(made[0])}
    for one in made:
        one.set_epoch(3)
    assert {len(list(one)) for one in made} == {len(made[0])}
