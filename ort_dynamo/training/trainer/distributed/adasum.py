"""Adasum as a communication hook of DistributedDataParallel.

Two gradients that point the same way are averaged, two at right angles are added (Maleki et al., "Scaling Distributed
Training with Adaptive Summation", 2020, section 3; Horovod's `AdasumOp`):

    Adasum(a, b) = (1 - a·b / (2‖a‖²))·a + (1 - a·b / (2‖b‖²))·b

for each parameter alone. Of 2ᵏ processes, neighbours are paired, then pairs of pairs, and so on: a binary tree.
"""

# No postponed annotations here: DistributedDataParallel compares the hook's with the types themselves.
from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup

__all__ = ["adasum_hook", "adasum_pair", "adasum_reduce"]


def adasum_pair(a: Tensor, b: Tensor) -> Tensor:
    """Combine two gradients of one parameter, with dot products in float64; if one is 0, give the other."""
    wide_a, wide_b = a.double(), b.double()
    product = (wide_a * wide_b).sum()
    of_a, of_b = (wide_a * wide_a).sum(), (wide_b * wide_b).sum()
    kept_a, kept_b = (
        1 - torch.where(square == 0, torch.zeros_like(square), product / (2 * square)) for square in (of_a, of_b)
    )
    return (kept_a * wide_a + kept_b * wide_b).to(a.dtype)


def adasum_hook(
    group: ProcessGroup | None,
    bucket: distributed.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Reduce a bucket of gradients by Adasum, parameter by parameter.

    Args:
        group: a group of 2ᵏ processes; None for all.
        bucket: the gradients from DistributedDataParallel; it is overwritten.

    Returns:
        A completed future of the bucket's tensor.
    """
    adasum_reduce(bucket.gradients(), group)
    buffer = bucket.buffer()
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    done.set_result(buffer)
    return done


def adasum_reduce(gradients: Sequence[Tensor], group: ProcessGroup | None) -> None:
    """Reduce gradients in place: each process exchanges all of them with one other, k times."""
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    distance = 1
    while distance < size:
        partner = rank ^ distance
        own = torch.cat([gradient.reshape(-1) for gradient in gradients])
        other = torch.empty_like(own)
        ops = [
            P2POp(distributed.isend, own, group=group, group_peer=partner),
            P2POp(distributed.irecv, other, group=group, group_peer=partner),
        ]
        for work in distributed.batch_isend_irecv(ops):
            work.wait()
        others = torch.split(other, [gradient.numel() for gradient in gradients])
        for gradient, received in zip(gradients, others, strict=True):
            pair = (gradient, received.view_as(gradient))
            # In the same order on both sides, so that both get the same bits.
            gradient.copy_(adasum_pair(*(pair if rank < partner else pair[::-1])))
        distance *= 2
