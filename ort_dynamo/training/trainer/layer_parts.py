"""The part that a process has of a weight which several processes share: the local tensor of torch's DTensor."""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

__all__ = ["group_of", "local_of", "norm_over", "part_of", "split_axis", "square_sum_over"]


def local_of(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The part that this process has, in the tensor's own memory; of a gradient, divided as `like` is."""
    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(like, DTensor) and tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local()


def split_axis(tensor: Tensor) -> int | None:
    """The axis that a tensor is divided along; None where each process has all of it."""
    if not isinstance(tensor, DTensor):
        return None
    (placement,) = tensor.placements
    return placement.dim if isinstance(placement, Shard) else None


def group_of(tensor: Tensor) -> ProcessGroup | None:
    """The processes that a tensor is divided among."""
    return tensor.device_mesh.get_group() if isinstance(tensor, DTensor) and split_axis(tensor) is not None else None


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, as `like` is divided; of one that has another shape, the tensor itself."""
    axis = split_axis(like)
    if axis is None or whole.shape != like.shape:
        return whole
    assert isinstance(like, DTensor)
    return whole.chunk(like.device_mesh.size(), axis)[like.device_mesh.get_local_rank()]


def square_sum_over(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the squares of all parts."""
    total = (tensor * tensor).sum()
    distributed.all_reduce(total, group=group)
    return total


def norm_over(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """The norm of all parts together."""
    return torch.sqrt((tensor * tensor).sum() if group is None else square_sum_over(tensor, group))
