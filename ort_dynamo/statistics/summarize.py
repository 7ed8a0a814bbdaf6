"""Summarizes a tensor in a few numbers, without holding it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Numbers", "count_abnormal", "summarize"]

_CHUNK = 1 << 22
"""Elements that are converted to float64 at a time: 32 MiB."""

_LARGE = 1e100
"""Elements above it are scaled, so that no square of a deviation overflows."""


class Numbers(NamedTuple):
    """Statistics of the finite elements of a tensor, and the number of the others.

    Attributes:
        min, max, mean: in the tensor's unit; None without finite elements.
        std: the standard deviation of these elements as a population, so that one element has 0; None without.
        nan: the number of elements that are NaN.
        inf: the number that are infinite, of either sign.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    nan: int
    inf: int


def count_abnormal(tensor: Tensor) -> Numbers:
    """Count the elements that are NaN or infinite, and nothing else."""
    nan = inf = 0
    if tensor.is_floating_point() or tensor.is_complex():
        for chunk in _chunks(tensor):
            kept, not_numbers = _finite(chunk)
            nan, inf = nan + not_numbers, inf + len(chunk) - len(kept) - not_numbers
    return Numbers(None, None, None, None, nan, inf)


def summarize(tensor: Tensor) -> Numbers:
    """Compute the statistics of a strided tensor in float64; of complex elements those of their absolute values."""
    nan = inf = finite = 0
    low, high = math.inf, -math.inf
    for chunk in _chunks(tensor):
        kept, not_numbers = _finite(chunk)
        nan, inf, finite = nan + not_numbers, inf + len(chunk) - len(kept) - not_numbers, finite + len(kept)
        if len(kept):
            least, most = torch.aminmax(kept)
            low, high = min(low, least.item()), max(high, most.item())
    if not finite:
        return Numbers(None, None, None, None, nan, inf)
    largest = max(abs(low), abs(high))
    scale = 2.0 ** math.floor(math.log2(largest)) if largest > _LARGE else 1.0  # a power of two rounds nothing
    mean, squares, count = 0.0, 0.0, 0
    for chunk in _chunks(tensor):
        kept, _ = _finite(chunk)
        if not len(kept):
            continue
        variance, own = (one.item() for one in torch.var_mean(kept if scale == 1.0 else kept / scale, correction=0))
        apart, total = own - mean, count + len(kept)
        # Deviations from the mean of all so far (Chan et al., 1979).
        squares += variance * len(kept) + apart**2 * count * len(kept) / total
        mean, count = mean + apart * len(kept) / total, total
    mean = min(max(mean * scale, low), high)  # rounding may put the mean of equal elements beside them
    return Numbers(low, high, mean, math.sqrt(squares / count) * scale, nan, inf)


def _finite(chunk: Tensor) -> tuple[Tensor, int]:
    """Give the finite elements, and the number of those that are NaN."""
    if not len(chunk) or all(math.isfinite(one.item()) for one in torch.aminmax(chunk)):  # which gives NaN if there is
        return chunk, 0
    return chunk[chunk.isfinite()], int(chunk.isnan().sum())


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements in float64, a part at a time."""
    flat = tensor.reshape(-1)
    for begin in range(0, len(flat), _CHUNK):
        chunk = flat[begin : begin + _CHUNK]
        if chunk.is_complex():
            chunk = chunk.to(torch.complex128).abs()
        yield chunk.to(torch.float64)
