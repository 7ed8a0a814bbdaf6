"""Calls whose argument values or sizes eager's CPU kernels refuse."""

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
        operator: its name in `torch`, or a Tensor's method.
        fault: the wrong argument, in the words of the page.
        function: the call, a function of the tensors.
        tensors: the arguments of the function.
    """

    operator: str
    fault: str
    function: Callable[..., Any]
    tensors: tuple[Tensor, ...]


LEFT = {
    ("cholesky_inverse", "factor with a zero on its diagonal"): (
        "ort_train raises a RuntimeError; eager raises torch.linalg.LinAlgError, a subclass of it."
    ),
}
"""(Operator, fault) -> the difference between the error and eager's."""


def floats(*numbers: float) -> Tensor:
    return tensor([float(number) for number in numbers])


def _losses() -> Iterator[Call]:
    name, good = "nn.functional.binary_cross_entropy", torch.full((3,), 0.5)
    for reduction in ("mean", "sum", "none"):

        def loss(x: Tensor, t: Tensor, reduction: str = reduction) -> Tensor:
            return F.binary_cross_entropy(x, t, reduction=reduction)

        for bad in (2.0, -0.5, NAN, INF):
            given = floats(0.5, bad, 0.3)
            yield Call(name, f"input element {bad}, reduction {reduction}", loss, (given, good))
            yield Call(name, f"target element {bad}, reduction {reduction}", loss, (good, given))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        pair = (floats(2, 0.5).to(dtype), torch.ones(2, dtype=dtype))
        yield Call(name, f"{str(dtype).removeprefix('torch.')} input element 2", F.binary_cross_entropy, pair)
    yield Call(name, "scalar input 2", F.binary_cross_entropy, (tensor(2.0), tensor(1.0)))
    yield Call(
        name, "input element 2, with weights", F.binary_cross_entropy, (floats(2, 0.5), torch.ones(2), torch.ones(2))
    )
    x, images = torch.randn(2, 3), torch.randn(2, 3, 2, 2)
    for bad in (3, -1):
        yield Call("nn.functional.nll_loss", f"label {bad}, 3 classes", F.nll_loss, (x, tensor([0, bad])))
        yield Call(
            "nn.functional.nll_loss",
            f"label {bad} in an image, 3 classes",
            F.nll_loss,
            (images, torch.full((2, 2, 2), bad)),
        )
        yield Call("nn.functional.cross_entropy", f"label {bad}, 3 classes", F.cross_entropy, (x, tensor([0, bad])))
        yield Call(
            "nn.functional.multi_margin_loss", f"label {bad}, 3 classes", F.multi_margin_loss, (x, tensor([0, bad]))
        )
    beta = lambda x, t: F.smooth_l1_loss(x, t, beta=-1.0)  # noqa: E731
    yield Call("nn.functional.smooth_l1_loss", "beta=-1", beta, (x, x))
    for delta in (0.0, -1.0):
        huber = lambda x, t, delta=delta: F.huber_loss(x, t, delta=delta)  # noqa: E731
        yield Call("nn.functional.huber_loss", f"delta={delta}", huber, (x, x))


def _activations() -> Iterator[Call]:
    x = torch.ones(3, requires_grad=True)
    yield Call("nn.functional.celu", "alpha=0", lambda x: F.celu(x, 0.0), (x,))
    yield Call("nn.functional.celu", "alpha=0, in place", lambda x: F.celu_(x.clone(), 0.0), (x,))
    yield Call("nn.functional.softshrink", "lambd=-1", lambda x: F.softshrink(x, -1.0), (x,))
    yield Call("nn.functional.hardtanh", "min_val=1, max_val=-1", lambda x: F.hardtanh(x, 1.0, -1.0), (x,))
    yield Call("nn.functional.glu", "odd size of the split dimension", F.glu, (x,))
    yield Call("nn.functional.dropout", "p=2", lambda x: F.dropout(x, 2.0), (x,))

    def gradient(of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.autograd.grad(of(x.mul(1)).sum(), x)[0]

    yield Call("nn.functional.elu_", "backward with alpha=-1", gradient(lambda x: F.elu_(x, -1.0)), (x,))
    leaky = gradient(lambda x: F.leaky_relu_(x, -1.0))
    yield Call("nn.functional.leaky_relu_", "backward with negative_slope=-1", leaky, (x,))


def _random() -> Iterator[Call]:
    for bad in (1.5, -0.1):
        yield Call("bernoulli", f"probability {bad}", torch.bernoulli, (floats(bad, 0.5),))
    for bad in (-0.1, NAN, INF):
        yield Call("multinomial", f"weight {bad}", lambda p: torch.multinomial(p, 1), (floats(bad, 0.5),))
    yield Call("multinomial", "all weights 0", lambda p: torch.multinomial(p, 1), (floats(0, 0),))
    yield Call(
        "multinomial",
        "3 samples of 2 weights, without replacement",
        lambda p: torch.multinomial(p, 3),
        (floats(1, 1),),
    )
    yield Call("normal", "std=-1", torch.normal, (floats(0, 0), floats(-1, 1)))
    yield Call("poisson", "rate -1", torch.poisson, (floats(-1, 1),))
    yield Call("Tensor.exponential_", "lambd=-1", lambda x: x.clone().exponential_(-1.0), (floats(1),))
    yield Call("Tensor.uniform_", "from=1, to=0", lambda x: x.clone().uniform_(1.0, 0.0), (floats(1),))


def _counts() -> Iterator[Call]:
    for bad in (NAN, INF, -INF):
        one, points = floats(bad, 1), tensor([[0.0, 1.0], [bad, 1.0]])
        yield Call("histc", f"value {bad}", lambda x: torch.histc(x, 3), (one,))
        yield Call("histogram", f"value {bad}", lambda x: torch.histogram(x, 3), (one,))
        yield Call("histogramdd", f"value {bad}", lambda x: torch.histogramdd(x, [2, 2]), (points,))
    yield Call("histc", "max=inf", lambda x: torch.histc(x, 3, 0, INF), (floats(0, 1),))
    yield Call("histc", "min=2, max=1", lambda x: torch.histc(x, 3, 2, 1), (floats(0, 1),))
    yield Call("bincount", "value -1", torch.bincount, (tensor([-1, 1]),))
    yield Call("nn.functional.one_hot", "class 3, 3 classes", lambda x: F.one_hot(x, 3), (tensor([3]),))
    repeat = lambda x, n: torch.repeat_interleave(x, n, output_size=1)  # noqa: E731
    yield Call("repeat_interleave", "repeat count -1", repeat, (tensor([1, 2]), tensor([1, -1])))
    for reduce in ("sum", "mean", "max", "min", "prod"):
        for fault, lengths in (
            ("length -1", [4, -1]),
            ("lengths sum to 2, size 3", [1, 1]),
            ("lengths sum to 4, size 3", [3, 1]),
        ):

            def segments(x: Tensor, lengths: Tensor, reduce: str = reduce) -> Tensor:
                return torch.segment_reduce(x, reduce, lengths=lengths)

            yield Call("segment_reduce", f"{fault}, reduce {reduce}", segments, (torch.ones(3), tensor(lengths)))
    rows = lambda x, n: torch.segment_reduce(x, "sum", lengths=n, axis=1)  # noqa: E731
    yield Call(
        "segment_reduce", "lengths of a row sum to 2, size 3", rows, (torch.ones(2, 3), tensor([[1, 2], [1, 1]]))
    )
    offsets = lambda x, n: torch.segment_reduce(x, "sum", offsets=n)  # noqa: E731
    yield Call("segment_reduce", "decreasing offsets", offsets, (torch.ones(3), tensor([0, 2, 1, 3])))
    for q in (1.5, NAN):
        yield Call("quantile", f"q={q}", torch.quantile, (torch.arange(5.0), tensor(q)))
        yield Call("nanquantile", f"q={q}", torch.nanquantile, (torch.arange(5.0), tensor(q)))
    for k in (0, 6):
        yield Call("kthvalue", f"k={k}, size 5", lambda x, k=k: torch.kthvalue(x, k), (torch.arange(5.0),))
    yield Call("topk", "k=6, size 5", lambda x: torch.topk(x, 6), (torch.arange(5.0),))


def _images() -> Iterator[Call]:
    for rank, unpool in ((1, F.max_unpool1d), (2, F.max_unpool2d), (3, F.max_unpool3d)):
        for bad in (-1, 2**rank):
            for channels in (1, 2):  # with two, index 2**rank of the first channel is inside the second one
                places = torch.zeros((1, channels, *[1] * rank), dtype=torch.int64)
                places[0, 0] = bad
                call = lambda x, i, unpool=unpool: unpool(x, i, 2)  # noqa: E731
                fault = f"index {bad}, {2**rank} output elements, {channels} channel{'s' * (channels > 1)}"
                yield Call(f"nn.functional.max_unpool{rank}d", fault, call, (torch.ones(places.shape), places))
    nothing, grid = torch.ones(1, 1, 0, 2), torch.ones(1, 1, 1, 2)
    sample = lambda x, g: F.grid_sample(x, g, align_corners=False)  # noqa: E731
    yield Call("nn.functional.grid_sample", "empty image", sample, (nothing, grid))
    average = lambda x: F.adaptive_avg_pool2d(x, 2)  # noqa: E731
    yield Call("nn.functional.adaptive_avg_pool2d", "empty image", average, (nothing,))


def _factories() -> Iterator[Call]:
    """Give calls that make a tensor of a dtype that their kernel does not have."""

    def hann_window(one: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.hann_window(5, dtype=dtype) + one

    def linspace(one: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.linspace(0, 3, 4, dtype=dtype) + one

    def logspace(one: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.logspace(0, 1, 3, dtype=dtype) + one

    for make, dtypes in (
        (hann_window, (torch.bool, torch.int64, torch.uint8)),
        (linspace, (torch.bool,)),
        (logspace, (torch.bool,)),
    ):
        for dtype in dtypes:
            call = functools.partial(make, dtype=dtype)
            yield Call(make.__name__, str(dtype).removeprefix("torch."), call, (torch.ones(1),))


def _linear_algebra() -> Iterator[Call]:
    zero, ones = torch.zeros(2, 2), torch.ones(2, 1)
    yield Call("linalg.cholesky", "matrix that is not positive definite", torch.linalg.cholesky, (-torch.eye(2),))
    yield Call("linalg.inv", "singular matrix", torch.linalg.inv, (zero,))
    yield Call("linalg.solve", "singular matrix", torch.linalg.solve, (zero, ones))
    yield Call("cholesky_inverse", "factor with a zero on its diagonal", torch.cholesky_inverse, (zero,))
    yield Call("cdist", "p=-1", lambda x: torch.cdist(x, x, p=-1.0), (zero,))
    yield Call("renorm", "p=0", lambda x: torch.renorm(x, 0.0, 0, 1.0), (zero,))
    yield Call("mvlgamma", "p=0", lambda x: torch.mvlgamma(x, 0), (zero,))


def _short(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _along(function: Callable[..., Any], first: tuple[int, ...], x: Tensor) -> Any:
    return function(x, *first, dim=0)


def _reductions() -> Iterator[Call]:
    """Give reductions over no elements: of an empty tensor, and along a dimension of size 0."""
    for name in ("max", "min", "amax", "amin", "argmax", "argmin", "aminmax"):
        function = getattr(torch, name)
        for x in (torch.empty(0), torch.empty(2, 0), torch.empty(0, dtype=torch.int64)):
            yield Call(name, f"empty {_short(x)} tensor of shape {tuple(x.shape)}", function, (x,))
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
            yield Call(name, f"empty dimension 0, {_short(x)}", along, (x,))
    yield Call("max", "empty slice", lambda x: x[:0].max(), (torch.ones(3),))
    yield Call("quantile", "empty tensor", lambda x: x.quantile(0.5), (torch.empty(0),))
    for order in (INF, -1):
        norm = lambda x, order=order: torch.linalg.vector_norm(x, order)  # noqa: E731
        yield Call("linalg.vector_norm", f"empty tensor, ord={order}", norm, (torch.empty(0),))


def _all() -> Iterator[Call]:
    for family in (_losses, _activations, _random, _counts, _factories, _images, _linear_algebra, _reductions):
        yield from family()
    yield from (Call(*row) for row in index_calls())


CALLS = tuple(_all())
