"""Samplers for several processes that step together, so that each has samples of like cost in each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed
from torch.utils.data import Sampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]

_Indices = npt.NDArray[np.int64]


class LoadBalancingDistributedSampler(Sampler[int]):
    """Gives each process its samples, such that those of one step cost about the same.

    Samples are sorted by their cost, neighbours dealt to the processes, and the order of these deals is shuffled, alike
    in every process. The method is that of bagua's load_balancing_data_loader.

    Args:
        dataset: a map-style dataset of constant length.
        complexity_fn: gives a sample's cost, an int.
        world_size: number of processes; by default that of torch.distributed.
        rank: this process's; by default that of torch.distributed.
        shuffle: shuffle the deals, or with a group_size the groups.
        group_size: sort within groups of so many samples, and not over all.
        seed: of the shuffle; the same in all processes.
        drop_last: leave samples out that do not deal out evenly; otherwise some come twice.
        random_level: from 0 to 1: how far random numbers, up to this fraction of the range of costs, blur the costs.

    Raises:
        ValueError: rank or random_level is out of range.
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[..., int],
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        group_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        if (world_size is None or rank is None) and not distributed.is_available():
            raise RuntimeError("Requires distributed package to be available")
        self.world_size: int = distributed.get_world_size() if world_size is None else world_size
        self.rank: int = distributed.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"Invalid rank {rank}, rank should be in the interval [0, {self.world_size - 1}]")
        if not 0 <= random_level <= 1:
            raise ValueError(f"Invalid random level {random_level}, should be in the range [0.0, 1.0]")
        self.dataset = dataset
        self.complexity_fn = complexity_fn
        self.shuffle = shuffle
        self.group_size = group_size
        self.seed = seed
        self.drop_last = drop_last
        self.random_level = random_level
        self.epoch: int = 0
        uneven = len(dataset) % self.world_size
        self.num_samples: int = len(dataset) // self.world_size + (1 if uneven and not drop_last else 0)
        self.total_size: int = self.num_samples * self.world_size
        self._costs: _Indices | None = None

    def __iter__(self) -> Iterator[int]:
        return iter([deal[self.rank] for deal in self.deals()])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the shuffle depends; call it before each one."""
        self.epoch = epoch

    def deals(self) -> list[list[int]]:
        """Return the samples of all processes: for each step, one index for each rank."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = self._in_order(generator)
        count = max(1, self.num_samples)
        dealt = [
            [int(order[(step * self.world_size + rank) % len(order)]) for rank in range(self.world_size)]
            for step in range(count)
        ]
        if self.shuffle and self.group_size is None:
            dealt = [dealt[index] for index in torch.randperm(count, generator=generator).tolist()]
        return dealt[: self.num_samples]

    def _in_order(self, generator: torch.Generator) -> _Indices:
        """Return the indices of samples, sorted by cost within each group, and the groups shuffled."""
        if self._costs is None:
            measured = (self.complexity_fn(self.dataset[index]) for index in range(len(self.dataset)))
            self._costs = np.fromiter(measured, dtype=np.int64, count=len(self.dataset))
        costs = self._costs
        blur = int((costs.max() - costs.min()) * self.random_level + 1)
        if blur > 1:
            costs = costs + torch.randint(blur, (len(costs),), generator=generator).numpy()
        size = self.group_size or len(costs)
        groups = [
            begin + np.argsort(costs[begin : begin + size], kind="stable") for begin in range(0, len(costs), size)
        ]
        if self.shuffle and self.group_size is not None:
            groups = [groups[index] for index in torch.randperm(len(groups), generator=generator).tolist()]
        return np.concatenate(groups)


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Gives each process batches of its samples that a function makes, of any size, and as many to each process.

    Args:
        sampler: deals the samples out; it must not drop any.
        batch_fn: makes batches, lists of indices, of a process's indices.
        drop_last: leave out batches that not all processes have; otherwise those with fewer repeat their first ones.

    Raises:
        ValueError: the sampler is of another class, or drops samples.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], Sequence[list[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ValueError("sampler should be of LoadBalancingDistributedSampler type.")
        if sampler.drop_last:
            raise ValueError("drop_last of sampler should be False")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self.world_size: int = sampler.world_size
        self.rank: int = sampler.rank
        self.generate_batches()

    def generate_batches(self) -> None:
        """Make the batches of the sampler's epoch."""
        deals = self.sampler.deals()
        made = [list(self.batch_fn([deal[rank] for deal in deals])) for rank in range(self.world_size)]
        lengths = [len(batches) for batches in made]
        self.total_batch: int = min(lengths) if self.drop_last else max(lengths)
        self.padded_batches: list[list[list[int]]] = [self._repeated(batches) for batches in made]

    def _repeated(self, batches: list[list[int]]) -> list[list[int]]:
        times = math.ceil(self.total_batch / max(1, len(batches)))
        return (batches * times)[: self.total_batch]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.padded_batches[self.rank])

    def __len__(self) -> int:
        return self.total_batch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and make its batches."""
        self.sampler.set_epoch(epoch)
        self.generate_batches()
