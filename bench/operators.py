"""The operators that bench_operators.py times one by one, each with inputs of about as many elements as asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["OPERATORS", "Operator"]


@dataclass(frozen=True)
class Operator:
    """A function of one operator, or of the few that its formula is usually written with.

    Attributes:
        function: called with the inputs; returns a tensor or a tuple that begins with one.
        inputs: a number of elements -> the inputs. Of those, floating-point tensors get a gradient.
        gradient: whether it has one.
    """

    function: Callable[..., Any]
    inputs: Callable[[int], tuple[Tensor, ...]]
    gradient: bool = True


def _side(count: int) -> int:
    return math.isqrt(count)


def _normal(count: int) -> tuple[Tensor]:
    return (torch.randn(_side(count), _side(count)),)


def _positive(count: int) -> tuple[Tensor]:
    return (torch.rand(_side(count), _side(count)) + 0.5,)


def _distinct(count: int) -> tuple[Tensor]:
    """No two equal, so that there is one order."""
    side = _side(count)
    return (torch.randperm(side * side).view(side, side).float(),)


def _two(count: int) -> tuple[Tensor, Tensor]:
    return (*_normal(count), *_normal(count))


def _two_positive(count: int) -> tuple[Tensor, Tensor]:
    return (*_positive(count), *_positive(count))


def _probabilities(count: int) -> tuple[Tensor, Tensor]:
    x, t = torch.rand(2, _side(count), _side(count)).clamp(0.01, 0.99)
    return x, t.round().bool()


def _integers(count: int) -> tuple[Tensor]:
    return (torch.randint(-1000, 1000, (_side(count), _side(count))),)


def _rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of 64, with a weight and a bias."""
    return torch.randn(count // 64, 64), torch.randn(64), torch.randn(64)


def _labelled(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count // 64, 64), torch.randint(64, (count // 64,))


def _images(count: int) -> tuple[Tensor]:
    side = _side(count // 16)
    return (torch.randn(2, 8, side, side),)


def _table(count: int) -> tuple[Tensor, Tensor]:
    """Make a table with rows of 64, and as many indices as it has rows."""
    return torch.randn(count // 64, 64), torch.randint(count // 64, (count // 64,))


def _bags(count: int) -> tuple[Tensor, Tensor, Tensor]:
    table, rows = _table(count)
    return table, rows, torch.arange(0, len(rows), 4)


def _places(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """An index for each entry along the last dimension, with repetitions, and a source."""
    side = _side(count)
    return torch.randn(side, side), torch.randint(side, (side, side)), torch.randn(side, side)


def _row_places(count: int) -> tuple[Tensor, Tensor, Tensor]:
    table, rows = _table(count)
    return table, rows, torch.randn_like(table)


def _slice_places(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of 64 along the second of three dimensions, an index for each, and a source."""
    slices = torch.randn(max(1, count // 4096), 64, 64)
    return slices, torch.randperm(64), torch.randn_like(slices)


def _masked(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.rand(_side(count), _side(count)) < 0.5, *_two(count)


def _grid(count: int) -> tuple[Tensor, Tensor]:
    (images,) = _images(count)
    return images, torch.rand(2, *images.shape[-2:], 2) * 2 - 1


def _affine(count: int) -> tuple[Tensor]:
    return (torch.randn(max(1, count // 8192), 2, 3),)


def _nearest(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0)


def _bilinear(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="bilinear")


def _affine_grid(theta: Tensor) -> Tensor:
    return F.affine_grid(theta, [len(theta), 1, 64, 64], align_corners=False)


_ELEMENTWISE: dict[str, Operator] = {
    "add": Operator(torch.add, _two),
    "mul": Operator(torch.mul, _two),
    "div": Operator(torch.div, _two_positive),
    "pow": Operator(torch.pow, _two_positive),
    "pow 2.5": Operator(lambda x: x**2.5, _positive),
    "exp": Operator(torch.exp, _normal),
    "exp2": Operator(torch.exp2, _normal),
    "log": Operator(torch.log, _positive),
    "log1p": Operator(torch.log1p, _positive),
    "sqrt": Operator(torch.sqrt, _positive),
    "rsqrt": Operator(torch.rsqrt, _positive),
    "sin": Operator(torch.sin, _normal),
    "tan": Operator(torch.tan, _normal),
    "atan2": Operator(torch.atan2, _two),
    "abs": Operator(torch.abs, _normal),
    "sign": Operator(torch.sign, _normal),
    "round": Operator(torch.round, _normal),
    "erf": Operator(torch.erf, _normal),
    "lgamma": Operator(torch.lgamma, _positive),
    "igamma": Operator(torch.igamma, _two_positive, gradient=False),
    "nextafter": Operator(torch.nextafter, _two, gradient=False),
    "frexp": Operator(torch.frexp, _normal),
    "maximum": Operator(torch.maximum, _two),
    "lerp": Operator(lambda x, y: torch.lerp(x, y, 0.3), _two),
    "clamp": Operator(lambda x: x.clamp(-0.5, 0.5), _normal),
    "clamp int64": Operator(lambda x: x.clamp(-500, 500), _integers, gradient=False),
    "add int64": Operator(lambda x: x + 7, _integers, gradient=False),
    "floor_divide int64": Operator(lambda x: x // 7, _integers, gradient=False),
    "remainder int64": Operator(lambda x: x % 7, _integers, gradient=False),
    "remainder": Operator(lambda x: x % 0.7, _normal),
    "where": Operator(torch.where, _masked),
    "masked_fill": Operator(lambda mask, x, _: x.masked_fill(mask, -1e9), _masked),
}

_ACTIVATIONS: dict[str, Operator] = {
    "relu": Operator(F.relu, _normal),
    "gelu": Operator(F.gelu, _normal),
    "silu": Operator(F.silu, _normal),
    "sigmoid": Operator(torch.sigmoid, _normal),
    "tanh": Operator(torch.tanh, _normal),
    "hardtanh": Operator(F.hardtanh, _normal),
    "relu6": Operator(F.relu6, _normal),
    "hardswish": Operator(F.hardswish, _normal),
    "hardsigmoid": Operator(F.hardsigmoid, _normal),
    "elu": Operator(F.elu, _normal),
    "selu": Operator(F.selu, _normal),
    "leaky_relu": Operator(F.leaky_relu, _normal),
    "prelu": Operator(lambda x, w, _: F.prelu(x, w), _rows),
    "softplus": Operator(F.softplus, _normal),
    "mish": Operator(F.mish, _normal),
    "logsigmoid": Operator(F.logsigmoid, _normal),
    "hardshrink": Operator(F.hardshrink, _normal),
    "softshrink": Operator(F.softshrink, _normal),
    "glu": Operator(F.glu, lambda count: (torch.randn(_side(count), _side(count) // 2 * 2),)),
    "threshold": Operator(lambda x: F.threshold(x, 0.1, 20.0), _normal),
}

_REDUCTIONS: dict[str, Operator] = {
    "sum": Operator(torch.sum, _normal),
    "sum rows": Operator(lambda x: x.sum(0), _normal),
    "mean last": Operator(lambda x: x.mean(-1), _normal),
    "var": Operator(lambda x: x.var(-1), _normal),
    "norm": Operator(lambda x: torch.linalg.vector_norm(x, dim=-1), _normal),
    "amax": Operator(lambda x: x.amax(-1), _distinct),
    "max": Operator(lambda x: x.max(-1), _distinct),
    "argmax": Operator(lambda x: x.argmax(-1), _distinct, gradient=False),
    "logsumexp": Operator(lambda x: x.logsumexp(-1), _normal),
    "prod": Operator(lambda x: x.prod(-1), _positive),
    "prod all": Operator(torch.prod, _positive),
    "softmax": Operator(lambda x: x.softmax(-1), _normal),
    "softmax rows": Operator(lambda x: x.softmax(0), _normal),
    "log_softmax": Operator(lambda x: x.log_softmax(-1), _normal),
    "layer_norm": Operator(lambda x, w, b: F.layer_norm(x, (64,), w, b), _rows),
    "rms_norm": Operator(lambda x, w, _: F.rms_norm(x, (64,), w), _rows),
    "group_norm": Operator(lambda x: F.group_norm(x, 4), _images),
    "cumsum": Operator(lambda x: x.cumsum(-1), _normal),
    "cumsum rows": Operator(lambda x: x.cumsum(0), _normal),
    "cumprod": Operator(lambda x: x.cumprod(-1), _positive),
    "cummax": Operator(lambda x: x.cummax(-1), _distinct),
    "logcumsumexp": Operator(lambda x: x.logcumsumexp(-1), _normal),
}

_LOSSES: dict[str, Operator] = {
    "cross_entropy": Operator(F.cross_entropy, _labelled),
    "nll_loss": Operator(F.nll_loss, _labelled),
    "mse_loss": Operator(F.mse_loss, _two),
    "l1_loss": Operator(F.l1_loss, _two),
    "smooth_l1": Operator(F.smooth_l1_loss, _two),
    "huber": Operator(F.huber_loss, _two),
    "bce": Operator(lambda x, t: F.binary_cross_entropy(x, t.float()), _probabilities),
    "bce_with_logits": Operator(lambda x, t: F.binary_cross_entropy_with_logits(x, t.float()), _probabilities),
    "kl_div": Operator(lambda x, t: F.kl_div(x, t, reduction="batchmean"), _two_positive),
    "cosine_similarity": Operator(F.cosine_similarity, _two),
}

_INDEXING: dict[str, Operator] = {
    "embedding": Operator(lambda table, rows: F.embedding(rows, table), _table),
    "embedding_bag": Operator(lambda table, rows, starts: F.embedding_bag(rows, table, starts), _bags),
    "embedding_bag max": Operator(lambda t, rows, starts: F.embedding_bag(rows, t, starts, mode="max"), _bags),
    "index rows": Operator(lambda table, rows: table[rows], _table),
    "index_select": Operator(lambda table, rows: table.index_select(0, rows), _table),
    "gather": Operator(lambda x, index, _: x.gather(-1, index), _places),
    "gather rows": Operator(lambda x, index, _: x.gather(0, index), _places),
    "take_along_dim": Operator(lambda x, index, _: x.take_along_dim(index, -1), _places),
    "scatter": Operator(lambda x, index, source: x.scatter(-1, index, source), _places),
    "scatter_add": Operator(lambda x, index, source: x.scatter_add(-1, index, source), _places),
    "scatter_add rows": Operator(lambda x, index, source: x.scatter_add(0, index, source), _places),
    "scatter_add of slices": Operator(lambda x, rows, s: x.scatter_add(0, rows[:, None].expand_as(s), s), _row_places),
    "scatter_reduce of slices": Operator(
        lambda x, rows, s: x.scatter_reduce(0, rows[:, None].expand_as(s), s, "mean"), _row_places
    ),
    "scatter_reduce amax": Operator(lambda x, index, s: x.scatter_reduce(-1, index, s, "amax"), _places),
    "index_put": Operator(lambda x, rows, source: x.index_put((rows,), source), _row_places),
    "index_put add": Operator(lambda x, rows, s: x.index_put((rows,), s, accumulate=True), _row_places),
    "index_add": Operator(lambda x, rows, source: x.index_add(0, rows, source), _row_places),
    "index_add of slices": Operator(lambda x, at, s: x.index_add(1, at, s), _slice_places),
    "index_reduce of slices": Operator(lambda x, at, s: x.index_reduce(1, at, s, "amax"), _slice_places),
    "index_copy of slices": Operator(lambda x, at, s: x.index_copy(1, at, s), _slice_places),
    "masked_scatter": Operator(lambda mask, x, y: x.masked_scatter(mask, y), _masked),
    "one_hot": Operator(lambda _, labels: F.one_hot(labels, 64), _labelled, gradient=False),
}

_ORDER: dict[str, Operator] = {
    "sort": Operator(lambda x: x.sort(-1), _distinct),
    "argsort": Operator(lambda x: x.argsort(-1), _distinct, gradient=False),
    "sort int64": Operator(lambda x: x.sort(-1), _integers, gradient=False),
    "topk": Operator(lambda x: x.topk(8), _distinct),
    "median": Operator(lambda x: x.median(-1), _distinct),
    "searchsorted": Operator(lambda x, y: torch.searchsorted(x[0].sort().values, y), _two, gradient=False),
}

_SHAPES: dict[str, Operator] = {
    "transpose": Operator(lambda x: x.t().contiguous(), _normal),
    "cat": Operator(lambda x, y: torch.cat([x, y], -1), _two),
    "stack": Operator(lambda x, y: torch.stack([x, y], -1), _two),
    "slice": Operator(lambda x: x[:, ::2].contiguous(), _normal),
    "pad": Operator(lambda x: F.pad(x, (1, 1, 1, 1)), _images),
    "pad reflect": Operator(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), _images),
    "roll": Operator(lambda x: x.roll(3, -1), _normal),
    "flip": Operator(lambda x: x.flip(-1), _normal),
    "repeat": Operator(lambda x: x.repeat(2, 2), _normal),
    "repeat_interleave": Operator(lambda x: x.repeat_interleave(2, -1), _normal),
    "tril": Operator(torch.tril, _normal),
    "expand": Operator(lambda _, w, __: w.expand(1024, 64).contiguous(), _rows),
    "unfold": Operator(lambda x: F.unfold(x, 3), _images),
    "unfold with stride": Operator(lambda x: F.unfold(x, 4, stride=2), _images),
    "pixel_shuffle": Operator(lambda x: F.pixel_shuffle(x, 2), _images),
}

_IMAGES: dict[str, Operator] = {
    "max_pool2d": Operator(lambda x: F.max_pool2d(x, 2), _images),
    "max_pool2d overlapping": Operator(lambda x: F.max_pool2d(x, 3, 2, 1), _images),
    "avg_pool2d": Operator(lambda x: F.avg_pool2d(x, 2), _images),
    "adaptive_avg_pool2d": Operator(lambda x: F.adaptive_avg_pool2d(x, 4), _images),
    "adaptive_max_pool2d": Operator(lambda x: F.adaptive_max_pool2d(x, 4), _images),
    "interpolate nearest": Operator(_nearest, _images),
    "interpolate bilinear": Operator(_bilinear, _images),
    "affine_grid": Operator(_affine_grid, _affine),
    "grid_sample": Operator(lambda x, grid: F.grid_sample(x, grid, align_corners=False), _grid),
}

OPERATORS: dict[str, Operator] = {
    **_ELEMENTWISE,
    **_ACTIVATIONS,
    **_REDUCTIONS,
    **_LOSSES,
    **_INDEXING,
    **_ORDER,
    **_SHAPES,
    **_IMAGES,
}
"""Name -> operator."""
