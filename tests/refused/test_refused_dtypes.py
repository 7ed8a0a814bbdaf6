"""Dtypes and dimensions that eager rejects raise torch's own error, and those that it accepts are computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ort_dynamo.lowering.builder import LoweringBuilder, MixedTypesError
from ort_dynamo.lowering.kernel_checks import left_to_torch
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.testing import eager_reasons

D = torch.float64
NUMBERS = (torch.float32, D, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


def outcome(function: Callable[..., Any], tensors: tuple[Tensor, ...], backend: str | None) -> Any:
    """The dtypes of a call's results, or the class and the first line of its error."""
    torch._dynamo.reset()
    called = function if backend is None else torch.compile(function, backend=backend)
    try:
        result = called(*(one.clone().requires_grad_(one.requires_grad) for one in tensors))
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    return [one.dtype for one in (result if isinstance(result, tuple) else (result,))]


def check(function: Callable[..., Any], *tensors: Tensor) -> None:
    """Compare with eager; where Dynamo raises instead, with aot_eager."""
    theirs, ours = outcome(function, tensors, None), outcome(function, tensors, "ort_train")
    if ours != theirs:
        assert ours == outcome(function, tensors, "aot_eager"), f"eager: {theirs}"


# -- dtypes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", NUMBERS[1:])
def test_a_linear_layer_refuses_another_dtype_in_eagers_words(dtype: torch.dtype, bias: bool) -> None:
    check(nn.Linear(4, 3, bias=bias), torch.ones(2, 4).to(dtype))
    check(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3, bias=bias)), torch.ones(2, 4).to(dtype))


PAIRS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mm": lambda x, y: x @ y.T,
    "bmm": lambda x, y: x[None] @ y[None].mT,
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, y[0], y[1], training=True),
    "layer_norm": lambda x, y: F.layer_norm(x, (3,), y[0], y[1]),
    "group_norm": lambda x, y: F.group_norm(x, 3, y[0], y[1]),
    "instance_norm": lambda x, y: F.instance_norm(x[None], None, None, y[0, :2], y[1, :2]),
    "rms_norm": lambda x, y: F.rms_norm(x, (3,), y[0]),
    "index_add": lambda x, y: x.index_add(0, torch.tensor([0, 1]), y),
    "index_copy": lambda x, y: x.index_copy(0, torch.tensor([0, 1]), y),
    "index_put": lambda x, y: x.index_put((torch.tensor([0, 1]),), y),
    "index_put, added": lambda x, y: x.index_put((torch.tensor([0, 1]),), y, accumulate=True),
    "scatter": lambda x, y: x.scatter(0, torch.zeros(2, 3, dtype=torch.int64), y),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.zeros(2, 3, dtype=torch.int64), y),
    "scatter_reduce": lambda x, y: x.scatter_reduce(0, torch.zeros(2, 3, dtype=torch.int64), y, "amax"),
    "masked_scatter": lambda x, y: x.masked_scatter(torch.ones(2, 3, dtype=torch.bool), y),
    "masked_fill": lambda x, y: x.masked_fill(torch.ones(2, 3, dtype=torch.bool), y[0, 0]),
    "nll_loss, weights": lambda x, y: F.nll_loss(x, torch.tensor([0, 1]), y[0]),
    "cross_entropy, targets": lambda x, y: F.cross_entropy(x, y[:, 0].clamp(0, 1)),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x, y),
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "soft_margin_loss": F.soft_margin_loss,
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="sum"),
    "cross": torch.linalg.cross,
    "embedding_bag": lambda x, y: F.embedding_bag(torch.tensor([[0, 1, 1]]), x, per_sample_weights=y[:1], mode="sum"),
    "embedding": lambda x, y: F.embedding(y.clamp(0, 1), x),
    "gather": lambda x, y: x.gather(0, y.clamp(0, 1)),
    "index": lambda x, y: x[y.clamp(0, 1)],
    "lerp": lambda x, y: torch.lerp(x, y, 0.5),
    "add": torch.add,
    "sub": torch.sub,
    "div": torch.div,
    "floor_divide": lambda x, y: torch.floor_divide(x, y + 1),
    "where": lambda x, y: torch.where(y > 0, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "pow": torch.pow,
    "prelu": lambda x, y: F.prelu(x, y[0]),
    "conv1d": lambda x, y: F.conv1d(x[None], y[None]),
    "bilinear": lambda x, y: F.bilinear(x, x, y[None, :, :2].new_ones(1, 3, 3)),
    "grid_sample": lambda x, y: F.grid_sample(x[None, None], y[None, None, :, :2], align_corners=False),
    "cdist": torch.cdist,
    "dist": torch.dist,
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], x[None]),
    "isin": torch.isin,
    "heaviside": torch.heaviside,
    "bucketize": lambda x, y: torch.bucketize(x, y[0]),
    "copysign": torch.copysign,
    "logical_and": torch.logical_and,
    "bitwise_and": torch.bitwise_and,
}


COMPLEX_NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "lerp": lambda x: torch.lerp(x, x + 1, 1j),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=1j),
    "addcdiv": lambda x: torch.addcdiv(x, x, x, value=1j),
    "add": lambda x: x + 1j,
    "mul": lambda x: x * 1j,
    "rsub": lambda x: 1j - x,
    "add, alpha": lambda x: torch.add(x, x, alpha=1j),
    "pow": lambda x: x**1j,
    "clamp": lambda x: x.clamp(min=1j),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1j),
    "full_like": lambda x: torch.full_like(x, 1j),
    "eq": lambda x: x == 1j,
    "where": lambda x: torch.where(x > 0, x, 1j),
    "addmm": lambda x: torch.addmm(x, x, x, alpha=1j),
    "pad": lambda x: torch.constant_pad_nd(x, (1, 1), 1j),
    "index_fill": lambda x: x.index_fill(0, torch.tensor([0]), 1j),
    "scatter": lambda x: x.scatter(0, torch.tensor([[0]]), 1j),
    "hardshrink": lambda x: F.hardshrink(x, 1j),
    "threshold": lambda x: F.threshold(x, 0.5, 1j),
    "fill": lambda x: torch.fill(x, 1j),
}


@pytest.mark.parametrize("name", COMPLEX_NUMBERS)
def test_complex_numbers_are_computed_or_refused_as_in_eager(name: str) -> None:
    check(COMPLEX_NUMBERS[name], torch.rand(3, 3))


@pytest.mark.parametrize("name", PAIRS)
def test_two_dtypes_are_computed_or_refused_as_in_eager(name: str) -> None:
    x, y = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    for one, other in itertools.permutations(NUMBERS, 2):
        if torch.float32 in (one, other) or {one, other} == {torch.float16, torch.bfloat16}:
            check(PAIRS[name], x.to(one), y.to(other))


SINGLE: dict[str, Callable[[Tensor], Any]] = {
    "relu": torch.relu,
    "bool matmul": lambda x: x @ x.T,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "celu": F.celu,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "softplus": F.softplus,
    "glu": lambda x: F.glu(x, 0),
    "mean": torch.mean,
    "var": torch.var,
    "norm": torch.linalg.vector_norm,
    "frac": torch.frac,
    "ceil": torch.ceil,
    "neg": torch.neg,
    "abs": torch.abs,
    "median": torch.median,
    "topk": lambda x: x.topk(1)[0],
    "argmax": torch.argmax,
    "kthvalue": lambda x: x.kthvalue(1)[0],
    "max_pool": lambda x: F.max_pool1d(x, 2),
    "avg_pool": lambda x: F.avg_pool1d(x, 2),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool1d(x, 1),
    "pad": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0),
    "conv1d": lambda x: F.conv1d(x, x[None]),
    "dilated conv1d": lambda x: F.conv1d(x, x[None, :, :2], dilation=2),
    "dilated conv3d": lambda x: F.conv3d(x[None, None, None], x[None, None, None, :, :1], dilation=(1, 1, 2)),
    "fft": torch.fft.rfft,
    "inv": lambda x: torch.linalg.inv(x[:, :2]),
    "det": lambda x: torch.linalg.det(x[:, :2]),
    "sum": torch.sum,
    "cumsum": lambda x: x.cumsum(0),
    "cumsum of bools": lambda x: x.cumsum(0, dtype=torch.bool),
    "cumprod of bools": lambda x: x.cumprod(0, dtype=torch.bool),
    "cumsum of bytes": lambda x: x.cumsum(0, dtype=torch.uint8),
    "sigmoid": torch.sigmoid,
    "bitwise_not": torch.bitwise_not,
    "logit": torch.logit,
    "erfinv": torch.erfinv,
    "airy": torch.special.airy_ai,
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_dtype_is_computed_or_refused_as_in_eager(name: str) -> None:
    x = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    for dtype in (*NUMBERS, torch.int16, torch.int8):
        check(SINGLE[name], x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_take_float32_weights_beside_halves_in_a_session(dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 8).to(dtype).requires_grad_(), torch.rand(8).requires_grad_()
    y = torch.compile(lambda x, w: F.layer_norm(x, (8,), w, w), backend="ort_train")(x, w)
    assert y.dtype is dtype
    y.sum().backward()
    assert w.grad is not None
    assert w.grad.dtype is torch.float32
    assert not eager_reasons()


def test_contrib_operators_take_one_dtype() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20, "com.microsoft": 1}, name="products")
    builder = LoweringBuilder(graph, find_target("cpu"))
    a, b = (builder.input(name, dtype, [2, 2]) for name, dtype in (("a", ir.DataType.FLOAT), ("b", ir.DataType.DOUBLE)))
    contrib = builder.opset("com.microsoft", 1)
    assert contrib.FusedMatMul(a, a, transA=1).dtype == ir.DataType.FLOAT
    with pytest.raises(MixedTypesError, match="FusedMatMul: T is both DOUBLE and FLOAT"):
        contrib.FusedMatMul(a, b, transA=1)


# -- dimensions ----------------------------------------------------------------------------------------------------

DIMENSIONS: dict[str, Callable[[Tensor, int], Any]] = {
    **{
        name: lambda x, dim, name=name: getattr(torch, name)(x, dim)
        for name in (
            *("softmax", "log_softmax", "cumsum", "cumprod", "logsumexp", "logcumsumexp", "cummax", "cummin", "sum"),
            *("mean", "var", "std", "prod", "amax", "amin", "argmax", "argmin", "max", "min", "median", "nanmedian"),
            *("mode", "any", "all", "sort", "argsort", "flip", "unbind", "squeeze", "unsqueeze", "count_nonzero"),
            *("var_mean", "std_mean", "nansum"),
        )
    },
    "topk": lambda x, dim: x.topk(1, dim),
    "kthvalue": lambda x, dim: x.kthvalue(1, dim),
    "stable sort": lambda x, dim: x.sort(stable=True, dim=dim),
    "unique": lambda x, dim: torch.unique(x, dim=dim),
    "unique_consecutive": lambda x, dim: torch.unique_consecutive(x, dim=dim),
    "glu": F.glu,
    "gather": lambda x, dim: x.gather(dim, torch.zeros_like(x, dtype=torch.int64)),
    "scatter": lambda x, dim: x.scatter(dim, torch.zeros_like(x, dtype=torch.int64), 1.0),
    "scatter_add": lambda x, dim: x.scatter_add(dim, torch.zeros_like(x, dtype=torch.int64), x),
    "index_select": lambda x, dim: x.index_select(dim, torch.tensor([0])),
    "index_add": lambda x, dim: x.index_add(dim, torch.tensor([0, 1]), x),
    "index_copy": lambda x, dim: x.index_copy(dim, torch.tensor([0, 1]), x),
    "index_fill": lambda x, dim: x.index_fill(dim, torch.tensor([0, 1]), 1.0),
    "roll": lambda x, dim: x.roll(1, dim),
    "cat": lambda x, dim: torch.cat([x, x], dim),
    "stack": lambda x, dim: torch.stack([x, x], dim),
    "split": lambda x, dim: x.split(1, dim),
    "chunk": lambda x, dim: x.chunk(2, dim),
    "narrow": lambda x, dim: x.narrow(dim, 0, 1),
    "select": lambda x, dim: x.select(dim, 0),
    "transpose": lambda x, dim: x.transpose(0, dim),
    "permute": lambda x, dim: x.permute(0, dim),
    "movedim": lambda x, dim: x.movedim(0, dim),
    "diagonal": lambda x, dim: x.diagonal(0, 0, dim),
    "diag_embed": lambda x, dim: torch.diag_embed(x, 0, 0, dim),
    "unfold": lambda x, dim: x.unfold(dim, 1, 1),
    "renorm": lambda x, dim: x.renorm(2, dim, 1.0),
    "cross": lambda x, dim: torch.linalg.cross(x.expand(3, 3, 3), x.expand(3, 3, 3), dim=dim),
    "norm": lambda x, dim: torch.linalg.vector_norm(x, dim=dim),
    "repeat_interleave": lambda x, dim: x.repeat_interleave(2, dim),
    "fft": lambda x, dim: torch.fft.fft(x, dim=dim),
    "quantile": lambda x, dim: x.quantile(0.5, dim),
    "diff": lambda x, dim: x.diff(dim=dim),
    "take_along_dim": lambda x, dim: torch.take_along_dim(x, torch.zeros_like(x, dtype=torch.int64), dim),
    "softmax of float64": lambda x, dim: x.softmax(dim, dtype=D),
    "softmin": lambda x, dim: F.softmin(x, dim),
    "normalize": lambda x, dim: F.normalize(x, dim=dim),
    "cosine_similarity": lambda x, dim: F.cosine_similarity(x, x, dim),
    "sum of two dimensions": lambda x, dim: x.sum((0, dim)),
    "flip of two dimensions": lambda x, dim: x.flip(0, dim),
    "tensor_split": lambda x, dim: x.tensor_split(2, dim),
    "segment_reduce": lambda x, dim: torch.segment_reduce(x, "sum", lengths=torch.tensor([3]), axis=dim),
}


@pytest.mark.parametrize("name", DIMENSIONS)
def test_a_dimension_out_of_range_is_refused_as_in_eager(name: str) -> None:
    for dim in (10, 3, -11):
        for x in (torch.rand(3, 3) if name in ("transpose", "permute") else torch.rand(3, 3, 3), torch.rand(3)):
            if "index" not in name:
                check(lambda x, dim=dim: DIMENSIONS[name](x, dim), x)


@pytest.mark.parametrize("name", ["softmax", "sort", "topk", "logsumexp", "cumsum"])
def test_a_dimension_out_of_range_is_refused_in_training_too(name: str) -> None:
    check(lambda x: DIMENSIONS[name](x, 4), torch.rand(2, 2).requires_grad_())


def test_a_dimension_in_range_is_left_to_no_kernel() -> None:
    x = torch.rand(2, 3)
    aten = torch.ops.aten
    for overload, args in (
        (aten._softmax.default, (x, -2, False)),
        (aten.unsqueeze.default, (x, 2)),
        (aten.unsqueeze.default, (torch.tensor(1.0), 0)),
        (aten.stack.default, ([x, x], -3)),
        (aten.sum.dim_IntList, (torch.tensor(1.0), [-1])),
        (aten.diag_embed.default, (x, 0, 0, 2)),
        (aten.select_backward.default, (torch.rand(3), [2, 3], 1, 0)),
        (aten.unfold_backward.default, (torch.rand(2, 3, 1), [2, 3], 1, 1, 1)),
    ):
        assert left_to_torch(overload, args, {}) is None, overload
