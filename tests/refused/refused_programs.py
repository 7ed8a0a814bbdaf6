"""These calls have arguments whose values or sizes eager's CPU kernels refuse."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from refused_indices import index_calls
from torch import Tensor, tensor

__all__ = ["CALLS", "LEFT", "Call"]

NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        operator: its name below `torch`, or a Tensor's method.
        fault: what is wrong with its arguments, as the page says it.
        function: takes the tensors.
        tensors: what it is called with.
    """

    operator: str
    fault: str
    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]


LEFT = {
    ("cholesky_inverse", "a factor with a zero on its diagonal"): (
        "It raises a RuntimeError; eager raises torch.linalg.LinAlgError, a subclass of it."
    ),
}
"""(Operator, fault) -> how the error differs from eager's, and why."""


def floats(*numbers: float) -> Tensor:
    return tensor([float(number) for number in numbers])


def _losses() -> Iterator[Call]:
    name, good = "nn.functional.binary_cross_entropy", torch.full((3,), 0.5)
    for reduction in ("mean", "sum", "none"):

        def loss(x: Tensor, t: Tensor, reduction: str = reduction) -> Tensor:
            return F.binary_cross_entropy(x, t, reduction=reduction)

        for bad in (2.0, -0.5, NAN, INF):
            given = floats(0.5, bad, 0.3)
            yield Call(name, f"an input of {bad}, {reduction}", loss, (given, good))
            yield Call(name, f"a target of {bad}, {reduction}", loss, (good, given))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        pair = (floats(2, 0.5).to(dtype), torch.ones(2, dtype=dtype))
        yield Call(name, f"an input of 2 in {dtype}", F.binary_cross_entropy, pair)
    yield Call(name, "a number of 2", F.binary_cross_entropy, (tensor(2.0), tensor(1.0)))
    yield Call(
        name, "an input of 2 with weights", F.binary_cross_entropy, (floats(2, 0.5), torch.ones(2), torch.ones(2))
    )
    x, images = torch.randn(2, 3), torch.randn(2, 3, 2, 2)
    for bad in (3, -1):
        yield Call("nn.functional.nll_loss", f"a label of {bad} of 3", F.nll_loss, (x, tensor([0, bad])))
        yield Call(
            "nn.functional.nll_loss",
            f"an image's label of {bad} of 3",
            F.nll_loss,
            (images, torch.full((2, 2, 2), bad)),
        )
        yield Call("nn.functional.cross_entropy", f"a label of {bad} of 3", F.cross_entropy, (x, tensor([0, bad])))
        yield Call(
            "nn.functional.multi_margin_loss", f"a label of {bad} of 3", F.multi_margin_loss, (x, tensor([0, bad]))
        )
    beta = lambda x, t: F.smooth_l1_loss(x, t, beta=-1.0)  # noqa: E731
    yield Call("nn.functional.smooth_l1_loss", "a beta of -1", beta, (x, x))
    for delta in (0.0, -1.0):
        huber = lambda x, t, delta=delta: F.huber_loss(x, t, delta=delta)  # noqa: E731
        yield Call("nn.functional.huber_loss", f"a delta of {delta}", huber, (x, x))


def _activations() -> Iterator[Call]:
    x = torch.ones(3, requires_grad=True)
    yield Call("nn.functional.celu", "an alpha of 0", lambda x: F.celu(x, 0.0), (x,))
    yield Call("nn.functional.celu", "an alpha of 0, in place", lambda x: F.celu_(x.clone(), 0.0), (x,))
    yield Call("nn.functional.hardshrink", "a negative lambd", lambda x: F.softshrink(x, -1.0), (x,))
    yield Call("nn.functional.hardtanh", "a minimum above the maximum", lambda x: F.hardtanh(x, 1.0, -1.0), (x,))
    yield Call("nn.functional.glu", "an odd size", F.glu, (x,))
    yield Call("nn.functional.dropout", "a p of 2", lambda x: F.dropout(x, 2.0), (x,))

    def gradient(of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.autograd.grad(of(x.mul(1)).sum(), x)[0]

    yield Call("nn.functional.elu_", "the gradient with an alpha of -1", gradient(lambda x: F.elu_(x, -1.0)), (x,))
    leaky = gradient(lambda x: F.leaky_relu_(x, -1.0))
    yield Call("nn.functional.leaky_relu_", "the gradient with a slope of -1", leaky, (x,))


def _random() -> Iterator[Call]:
    for bad in (1.5, -0.1):
        yield Call("bernoulli", f"a probability of {bad}", torch.bernoulli, (floats(bad, 0.5),))
    for bad in (-0.1, NAN, INF):
        yield Call("multinomial", f"a weight of {bad}", lambda p: torch.multinomial(p, 1), (floats(bad, 0.5),))
    yield Call("multinomial", "weights of 0", lambda p: torch.multinomial(p, 1), (floats(0, 0),))
    yield Call("multinomial", "too many samples", lambda p: torch.multinomial(p, 3), (floats(1, 1),))
    yield Call("normal", "a negative deviation", torch.normal, (floats(0, 0), floats(-1, 1)))
    yield Call("poisson", "a negative rate", torch.poisson, (floats(-1, 1),))
    yield Call("Tensor.exponential_", "a negative rate", lambda x: x.clone().exponential_(-1.0), (floats(1),))
    yield Call("Tensor.uniform_", "ends in the wrong order", lambda x: x.clone().uniform_(1.0, 0.0), (floats(1),))


def _counts() -> Iterator[Call]:
    for bad in (NAN, INF, -INF):
        one, points = floats(bad, 1), tensor([[0.0, 1.0], [bad, 1.0]])
        yield Call("histc", f"a value of {bad}", lambda x: torch.histc(x, 3), (one,))
        yield Call("histogram", f"a value of {bad}", lambda x: torch.histogram(x, 3), (one,))
        yield Call("histogramdd", f"a value of {bad}", lambda x: torch.histogramdd(x, [2, 2]), (points,))
    yield Call("histc", "an infinite range", lambda x: torch.histc(x, 3, 0, INF), (floats(0, 1),))
    yield Call("histc", "ends in the wrong order", lambda x: torch.histc(x, 3, 2, 1), (floats(0, 1),))
    yield Call("bincount", "a negative value", torch.bincount, (tensor([-1, 1]),))
    yield Call("nn.functional.one_hot", "a class of 3 of 3", lambda x: F.one_hot(x, 3), (tensor([3]),))
    repeat = lambda x, n: torch.repeat_interleave(x, n, output_size=1)  # noqa: E731
    yield Call("repeat_interleave", "a negative count", repeat, (tensor([1, 2]), tensor([1, -1])))
    for reduce in ("sum", "mean", "max", "min", "prod"):
        for fault, lengths in (("a negative length", [4, -1]), ("too few", [1, 1]), ("too many", [3, 1])):

            def segments(x: Tensor, lengths: Tensor, reduce: str = reduce) -> Tensor:
                return torch.segment_reduce(x, reduce, lengths=lengths)

            yield Call("segment_reduce", f"{fault}, {reduce}", segments, (torch.ones(3), tensor(lengths)))
    rows = lambda x, n: torch.segment_reduce(x, "sum", lengths=n, axis=1)  # noqa: E731
    yield Call("segment_reduce", "too few in a row", rows, (torch.ones(2, 3), tensor([[1, 2], [1, 1]])))
    offsets = lambda x, n: torch.segment_reduce(x, "sum", offsets=n)  # noqa: E731
    yield Call("segment_reduce", "offsets that descend", offsets, (torch.ones(3), tensor([0, 2, 1, 3])))
    for q in (1.5, NAN):
        yield Call("quantile", f"a q of {q}", torch.quantile, (torch.arange(5.0), tensor(q)))
        yield Call("nanquantile", f"a q of {q}", torch.nanquantile, (torch.arange(5.0), tensor(q)))
    for k in (0, 6):
        yield Call("kthvalue", f"a k of {k} of 5", lambda x, k=k: torch.kthvalue(x, k), (torch.arange(5.0),))
    yield Call("topk", "a k of 6 of 5", lambda x: torch.topk(x, 6), (torch.arange(5.0),))


def _images() -> Iterator[Call]:
    for rank, unpool in ((1, F.max_unpool1d), (2, F.max_unpool2d), (3, F.max_unpool3d)):
        for bad in (-1, 2**rank):
            for channels in (1, 2):  # the second one's places come before those of another channel
                places = torch.zeros((1, channels, *[1] * rank), dtype=torch.int64)
                places[0, 0] = bad
                call = lambda x, i, unpool=unpool: unpool(x, i, 2)  # noqa: E731
                fault = f"a place of {bad} in one of {channels} channels"
                yield Call(f"nn.functional.max_unpool{rank}d", fault, call, (torch.ones(places.shape), places))
    nothing, grid = torch.ones(1, 1, 0, 2), torch.ones(1, 1, 1, 2)
    sample = lambda x, g: F.grid_sample(x, g, align_corners=False)  # noqa: E731
    yield Call("nn.functional.grid_sample", "an image without elements", sample, (nothing, grid))
    average = lambda x: F.adaptive_avg_pool2d(x, 2)  # noqa: E731
    yield Call("nn.functional.adaptive_avg_pool2d", "an image without elements", average, (nothing,))


def _linear_algebra() -> Iterator[Call]:
    zero, ones = torch.zeros(2, 2), torch.ones(2, 1)
    yield Call("linalg.cholesky", "a matrix that is not positive definite", torch.linalg.cholesky, (-torch.eye(2),))
    yield Call("linalg.inv", "a singular matrix", torch.linalg.inv, (zero,))
    yield Call("linalg.solve", "a singular matrix", torch.linalg.solve, (zero, ones))
    yield Call("cholesky_inverse", "a factor with a zero on its diagonal", torch.cholesky_inverse, (zero,))
    yield Call("cdist", "a negative p", lambda x: torch.cdist(x, x, p=-1.0), (zero,))
    yield Call("renorm", "a p of 0", lambda x: torch.renorm(x, 0.0, 0, 1.0), (zero,))
    yield Call("mvlgamma", "a p of 0", lambda x: torch.mvlgamma(x, 0), (zero,))


def _along(function: Callable[..., Any], first: tuple[int, ...], x: Tensor) -> Any:
    return function(x, *first, dim=0)


def _reductions() -> Iterator[Call]:
    """Reductions over no elements: a whole tensor, and a dimension that is 0."""
    for name in ("max", "min", "amax", "amin", "argmax", "argmin", "aminmax"):
        function = getattr(torch, name)
        for x in (torch.empty(0), torch.empty(2, 0), torch.empty(0, dtype=torch.int64)):
            yield Call(name, f"no elements: {x.dtype}, {tuple(x.shape)}", function, (x,))
    for name in (
        "max",
        "min",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "aminmax",
        "median",
        "nanmedian",
        "mode",
        "kthvalue",
    ):
        first = (1,) if name == "kthvalue" else ()
        along = functools.partial(_along, getattr(torch, name), first)
        for x in (torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int64)):
            yield Call(name, f"no elements along dimension 0: {x.dtype}", along, (x,))
    yield Call("max", "no elements of a slice", lambda x: x[:0].max(), (torch.ones(3),))
    yield Call("quantile", "no elements", lambda x: x.quantile(0.5), (torch.empty(0),))
    for order in (INF, -1):
        norm = lambda x, order=order: torch.linalg.vector_norm(x, order)  # noqa: E731
        yield Call("linalg.vector_norm", f"no elements, of order {order}", norm, (torch.empty(0),))


def _all() -> Iterator[Call]:
    for family in (_losses, _activations, _random, _counts, _images, _linear_algebra, _reductions):
        yield from family()
    yield from (Call(*row) for row in index_calls())


CALLS = tuple(_all())
