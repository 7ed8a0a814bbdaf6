"""Calls with indices out of bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, tensor

__all__ = ["index_calls"]

Row = tuple[str, str, Callable[..., Any], tuple[Tensor, ...]]
"""The attributes of a Call."""

_TOO_HIGH = {"5, size 5": [5], "5 after a valid {}": [0, 5], "2**63 - 1": [(1 << 63) - 1]}
_COUNTED = {**_TOO_HIGH, "-6, size 5": [-6], "-2**63": [-(1 << 63)]}
_FROM_START = {**_TOO_HIGH, "-1": [-1], "-2**63": [-(1 << 63)]}


def _ones(index: Tensor) -> Tensor:
    return torch.ones(index.shape)


def _written(x: Tensor, index: Tensor) -> Tensor:
    result = x.clone()
    result[index] = 1.0
    return result


def _reads() -> dict[str, Callable[[Tensor, Tensor], Any]]:
    """Give the operators whose negative indices count from the end."""
    return {
        "Tensor.__getitem__": lambda x, i: x[i],
        "index_put": lambda x, i: torch.index_put(x, (i,), tensor(1.0)),
        "Tensor.__setitem__": _written,
        "take": lambda x, i: torch.take(x, i),
        "put": lambda x, i: torch.put(x, i, _ones(i)),
        "index_fill": lambda x, i: torch.index_fill(x, 0, i, 1.0),
    }


def _places() -> dict[str, Callable[[Tensor, Tensor], Any]]:
    """Give the operators that take no negative index."""
    found: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "gather": lambda x, i: torch.gather(x, 0, i),
        "scatter": lambda x, i: torch.scatter(x, 0, i, 1.0),
        "scatter_add": lambda x, i: torch.scatter_add(x, 0, i, _ones(i)),
        "index_select": lambda x, i: torch.index_select(x, 0, i),
        "index_add": lambda x, i: torch.index_add(x, 0, i, _ones(i)),
        "index_copy": lambda x, i: torch.index_copy(x, 0, i, _ones(i)),
    }
    for reduce in ("sum", "prod", "mean", "amax", "amin"):
        found[f"scatter_reduce ({reduce})"] = lambda x, i, r=reduce: torch.scatter_reduce(x, 0, i, _ones(i), r)
        if reduce != "sum":
            found[f"index_reduce ({reduce})"] = lambda x, i, r=reduce: torch.index_reduce(x, 0, i, _ones(i), r)
    return found


def index_calls() -> Iterator[Row]:
    """Give the rows, operator by operator."""
    line, table = torch.arange(5.0), torch.ones(5, 3)
    for functions, faults in ((_reads(), _COUNTED), (_places(), _FROM_START)):
        for name, function in functions.items():
            for fault, numbers in faults.items():
                yield name, f"index {fault.format('index')}", function, (line, tensor(numbers))
    for fault, numbers in _FROM_START.items():
        rows, row, index = tensor(numbers), fault.format("row"), fault.format("index")
        yield "gather", f"row {row}", lambda x, i: torch.gather(x, 0, i[:, None].expand(-1, 3)), (table, rows)
        scattered = lambda x, i: torch.scatter_add(x, 0, i[:, None].expand(-1, 3), torch.ones(len(i), 3))  # noqa: E731
        yield "scatter_add", f"row {row}", scattered, (table, rows)
        loose = lambda x, i: torch.scatter_add(x, 0, i[:, None] + torch.zeros_like(x[:1]).long(), torch.ones(len(i), 3))  # noqa: E731
        yield "scatter_add", f"row {row}, index not expanded", loose, (table, rows)
        added = lambda x, i: torch.index_add(x, 0, i, torch.ones(len(i), 3))  # noqa: E731
        yield "index_add", f"row {row}", added, (table, rows)
        yield "nn.functional.embedding", f"index {index}", lambda x, i: F.embedding(i, x), (table, rows)
    for fault, number in {"-1": -1, "-2**31": -(1 << 31), "5, size 5": 5}.items():
        narrow = tensor([number], dtype=torch.int32)
        yield "nn.functional.embedding", f"int32 index {fault}", lambda x, i: F.embedding(i, x), (table, narrow)
    yield from _bags(table)
    for number in (2, -1):
        sorter = lambda s, v, i: torch.searchsorted(s, v, sorter=i)  # noqa: E731
        yield (
            "searchsorted",
            f"index {number} in `sorter`, size 2",
            sorter,
            (tensor([1.0, 2.0]), tensor([1.5]), tensor([0, number])),
        )
    mask, short = torch.ones(5, dtype=torch.bool), torch.ones(3)
    yield "masked_scatter", "fewer values than True elements of the mask", torch.masked_scatter, (line, mask, short)
    yield (
        "masked_scatter",
        "no values for a mask with True elements",
        torch.masked_scatter,
        (line, mask, torch.empty(0)),
    )
    put = lambda x, m, v: torch.index_put(x, (m,), v)  # noqa: E731
    yield "index_put", "fewer values than True elements of the mask", put, (line, mask, short)


def _bags(table: Tensor) -> Iterator[Row]:
    name = "nn.functional.embedding_bag"
    for mode in ("sum", "mean", "max"):

        def bags(x: Tensor, i: Tensor, offsets: Tensor, mode: str = mode, last: bool = False) -> Tensor:
            return F.embedding_bag(i, x, offsets, mode=mode, include_last_offset=last)

        def with_last(x: Tensor, i: Tensor, offsets: Tensor, bags: Callable[..., Tensor] = bags) -> Tensor:
            return bags(x, i, offsets, last=True)

        for number in (5, -1):
            yield name, f"index {number}, 5 rows, mode {mode}", bags, (table, tensor([number, 0]), tensor([0]))
        yield name, f"first offset 1, mode {mode}", bags, (table, tensor([1, 0]), tensor([1]))
        yield name, f"offset 3 with 2 indices, mode {mode}", bags, (table, tensor([1, 0]), tensor([0, 3]))
        yield (
            name,
            f"last offset 4 with 3 indices, mode {mode}",
            with_last,
            (table, tensor([1, 0, 2]), tensor([0, 2, 4])),
        )
