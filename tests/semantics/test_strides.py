"""Tests of strides of results: operators on many layouts, against eager; differences of aot_eager are torch's.

All operators of a layout are one graph, so that there is one compile for each layout or pair of layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.filterwarnings("ignore")


def _ordered(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Copy a tensor to a memory layout with the dimensions in `order`."""
    inverse = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(*order).clone(memory_format=torch.contiguous_format).permute(*inverse)


def _stepped(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(2, -1)[..., ::2]


def _named(module: Any, *lines: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(module, name) for line in lines for name in line.split()}


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: _ordered(x, (*range(x.dim() - 2), x.dim() - 1, x.dim() - 2)),
    "rotated": lambda x: _ordered(x, (x.dim() - 1, *range(x.dim() - 1))),
    "reversed": lambda x: _ordered(x, (*reversed(range(x.dim())),)),
    "channels_last": lambda x: _ordered(x, (0, *range(2, x.dim()), 1)) if x.dim() > 2 else x,
    "stepped": _stepped,
    "sliced": lambda x: F.pad(x, (1, 1))[..., 1:-1],
    "stepped and transposed": lambda x: _stepped(x.mT.contiguous()).mT,
    "expanded": lambda x: x[:1].expand_as(x),
    "expanded inside": lambda x: x[..., :1].expand_as(x),
}

SHAPES = ((2, 3, 4, 5), (5, 6), (2, 3, 2, 3, 4))
"""The shapes of images, matrices and volumes."""

OF_ONE = ((5, 1), (1, 5), (2, 1, 3), (4, 8, 1, 1), (8, 1, 3, 3), (1, 3, 4, 4))
"""Shapes with dimensions of one element."""

UNARY: dict[str, Callable[[Tensor], Any]] = {
    **_named(
        torch,
        "abs acos angle asinh atan ceil cos deg2rad digamma erf erfc exp expm1 floor frac isfinite isinf",
        "isnan isneginf lgamma log log10 log1p logit neg positive rad2deg reciprocal relu round rsqrt",
        "sgn sigmoid sign signbit sin sinc sqrt square tan tanh trunc logical_not nan_to_num ones_like",
        "zeros_like rand_like empty_like clone",
    ),
    **_named(
        F,
        "elu selu celu relu6 hardtanh hardswish hardsigmoid leaky_relu logsigmoid softplus softsign",
        "tanhshrink hardshrink softshrink mish silu gelu",
    ),
    "plus a number": lambda x: (x + 1, 1 - x, x * 2, x / 3, 2 / x, x // 1, x % 2),
    "compared with a number": lambda x: (x > 0.5, x == 1, x.clamp(0.2, 0.8), x.clamp(min=0.5)),
    "powers": lambda x: (x**2, x**0.5, 2**x, x**3),
    "dtypes": lambda x: (x.double(), x.half(), x.bool(), x.long().bitwise_and(3), x.to(torch.bfloat16)),
    "filled": lambda x: (torch.full_like(x, 2), torch.randn_like(x), torch.randint_like(x, 5)),
    "masked": lambda x: (x.masked_fill(x > 0.5, 0), torch.where(x > 0.5, x, 0), torch.where(x > 0.5, 1.0, 0.0)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "sums": lambda x: (x.sum(0), x.sum(-1, True), x.sum((0, 1), True), x.mean(0, True), x.mean(-1)),
    "extremes": lambda x: (x.amax(0), x.amin(-1, True), x.max(-1), x.min(0, True), x.argmax(0), x.argmin(-1, True)),
    "moments": lambda x: (x.var(-1), x.std(0, keepdim=True), torch.var_mean(x, -1), x.norm(2, 0), x.norm(1, -1, True)),
    "products": lambda x: (x.prod(0), x.prod(-1, True), x.logsumexp(0), x.logsumexp(-1, True), x.nansum(0)),
    "truths": lambda x: ((x > 0.5).any(0), (x > 0.5).all(-1, True), x.count_nonzero(0)),
    "scans": lambda x: (x.cumsum(0), x.cumsum(-1), x.cumprod(0), x.cummax(-1), x.logcumsumexp(0)),
    "normalized": lambda x: (x.softmax(0), x.softmax(-1), x.log_softmax(0), F.normalize(x, dim=0)),
    "layer_norm": lambda x: (F.layer_norm(x, x.shape[-1:]), F.rms_norm(x, x.shape[-1:]), F.layer_norm(x, x.shape[1:])),
    "sorted": lambda x: (x.sort(0), x.sort(-1, descending=True), x.topk(1, -1), x.argsort(0)),
    "medians": lambda x: (x.median(0), x.kthvalue(1, -1), x.mode(-1), x.quantile(0.5, 0)),
    "flipped": lambda x: (x.flip(0), x.flip(0, -1), x.roll(1, 0), x.roll((1, 2), (0, -1)), x.roll(1)),
    "triangles": lambda x: (x.tril(), x.triu(1)),
    "joined": lambda x: (torch.cat([x, x]), torch.cat([x, x], -1), torch.stack([x, x]), torch.stack([x, x], -1)),
    "repeated": lambda x: (x.repeat(*[2] * x.dim()), x.repeat_interleave(2, 0), x.repeat_interleave(2, -1), x.tile(2)),
    "padded": lambda x: (F.pad(x, (1, 1)), F.pad(x, (0, 1, 1, 0), value=1.0)),
    "copied": lambda x: (x.contiguous(), x.mT.contiguous() + 0, x.reshape(-1), x.flatten(0, 1), (x * 2).mT, x.mT * 2),
    "sliced": lambda x: (
        x[1:] * 2,
        x[..., 1:] + x[..., :-1],
        x[..., ::2].exp(),
        x.narrow(0, 0, 1).sin(),
        x[:, None] * 2,
    ),
    "taken": lambda x: (
        x.index_select(0, torch.tensor([0, 0])),
        x.index_select(-1, torch.tensor([0, 0])),
        x[torch.tensor([0, 0])],
        x[..., torch.tensor([0, 0])],
        x[:, torch.tensor([0, 0])],
        x.gather(-1, torch.zeros(x.shape, dtype=torch.int64)),
        x.take(torch.tensor([[0, 1], [1, 0]])),
        torch.take_along_dim(x, torch.zeros(x.shape, dtype=torch.int64), 0),
    ),
    "put": lambda x: (
        x.index_add(0, torch.tensor([0]), x[:1]),
        x.index_copy(-1, torch.tensor([0]), x[..., :1]),
        x.index_fill(0, torch.tensor([0]), 1.0),
        x.scatter(0, torch.zeros(x.shape, dtype=torch.int64), x),
        x.scatter_add(-1, torch.zeros(x.shape, dtype=torch.int64), x),
        x.index_put((torch.tensor([0]),), x[:1]),
        x.select_scatter(x[0], 0, 0),
        x.slice_scatter(x[:1], 0, 0, 1),
    ),
}

IMAGES: dict[str, Callable[[Tensor], Any]] = {
    "padded around": lambda x: [F.pad(x, (1, 1) * (x.dim() - 2), mode=m) for m in ("reflect", "replicate", "circular")],
    "pooled": lambda x: (
        (F.avg_pool2d(x, 2), F.max_pool2d(x, 2), F.adaptive_avg_pool2d(x, 2), F.adaptive_max_pool2d(x, 2))
        if x.dim() == 4
        else (F.avg_pool3d(x, 2), F.max_pool3d(x, 2), F.adaptive_avg_pool3d(x, 2), F.adaptive_max_pool3d(x, 2))
    ),
    "resized": lambda x: [
        F.interpolate(x, scale_factor=2, mode=mode)
        for mode in (("nearest", "bilinear", "bicubic", "nearest-exact") if x.dim() == 4 else ("nearest", "trilinear"))
    ],
    "batch_norm": lambda x: (
        F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
        F.batch_norm(x, None, None, training=True),
        F.group_norm(x, 1),
        F.instance_norm(x),
    ),
    "unpooled": lambda x: (
        F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)
        if x.dim() == 4
        else F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2)
    ),
    "classes": lambda x: F.nll_loss(x, (x[:, 0] * 0).long(), reduction="none") if x.shape[1] > 1 else x * 2,
    "shuffled": lambda x: (F.channel_shuffle(x, 1), F.dropout2d(x, 0.5)),
    "convolved": lambda x: (
        F.conv2d(x, torch.ones(4, x.shape[1], 1, 1))
        if x.dim() == 4
        else F.conv3d(x, torch.ones(4, x.shape[1], 1, 1, 1))
    ),
}

BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    **_named(
        torch,
        "add sub mul div true_divide floor_divide fmod remainder pow maximum minimum fmax fmin atan2",
        "hypot copysign xlogy logaddexp logaddexp2 nextafter eq ne lt le gt ge logical_and logical_or",
        "logical_xor isclose heaviside float_power rsub dist",
    ),
    "divided": lambda a, b: (torch.div(a, b, rounding_mode="floor"), torch.div(a, b, rounding_mode="trunc")),
    "xlog1py": torch.special.xlog1py,
    "zeta": torch.special.zeta,
    "ldexp": lambda a, b: torch.ldexp(a, b.round()),
    "gcd": lambda a, b: (torch.gcd((a * 9).long(), (b * 9).long()), (a * 9).long() // ((b * 9).long() + 1)),
    "bits": lambda a, b: ((a * 9).int() & (b * 9).int(), (a * 9).int() << (b * 2).int()),
    "where": lambda a, b: (torch.where(a > b, a, b), torch.where(b > 0.5, a, 1.0), torch.where(a > 0.5, 0.0, b)),
    "lerp": lambda a, b: (torch.lerp(a, b, 0.3), torch.lerp(a, b, b)),
    "addcmul": lambda a, b: (torch.addcmul(a, a, b), torch.addcdiv(b, a, b + 1)),
    "masked": lambda a, b: (a.masked_fill(b > 0.5, 0), torch.clamp(a, b, b + 1), torch.clamp(a, max=b)),
    "broadcast": lambda a, b: (a + b[:1], a * b[..., :1], a[..., :1] // b, torch.maximum(a[:1], b[..., :1]), a - b[0]),
    "compared": lambda a, b: (a > b[:1], torch.floor_divide(a[:1], b), torch.copysign(a, b[..., :1])),
    "losses": lambda a, b: [
        loss(a, b, reduction="none") for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div)
    ],
    "cat": lambda a, b: (torch.cat([a, b]), torch.cat([a, b], 1), torch.stack([a, b]), torch.stack([a, b], -1)),
    "matmul": lambda a, b: (a @ b.mT, a.mT @ b),
    "addr": lambda a, b: (
        (torch.addr(a, b[:, 0], b[0]), torch.addr(a, b[:, 0], b[0], beta=0.0), torch.outer(a[0], b[0]))
        if a.dim() == 2
        else a + b
    ),
    "gradients": lambda a, b: (
        torch.ops.aten.native_dropout_backward(a, b > 0.5, 2.0),
        torch.ops.aten.tanh_backward(a, b),
        *(
            torch.ops.aten.sigmoid_backward(a, b),
            torch.ops.aten.gelu_backward(a, b),
            torch.ops.aten.silu_backward(a, b),
        ),
    ),
}


def _described(result: Any) -> list[Any]:
    tensors = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
    return [(one.dtype, tuple(one.shape), one.stride() if one.numel() else ()) for one in tensors]


def _differences(table: Mapping[str, Callable[..., Any]], operands: Sequence[Tensor], **given: Any) -> Iterator[str]:
    """Say which operators of a table have other strides than in eager, and in aot_eager eager's."""
    wanted: dict[str, Any] = {}
    for name, function in table.items():
        try:
            wanted[name] = _described(function(*operands))
        except (RuntimeError, IndexError, ValueError):  # it does not take such sizes
            continue
    assert wanted

    def compiled(backend: str, **given: Any) -> dict[str, Any]:
        torch.compiler.reset()

        def all_of_them(*operands: Tensor) -> list[Any]:
            return [table[name](*operands) for name in wanted]

        results = torch.compile(all_of_them, backend=backend, **given)(*operands)
        return dict(zip(wanted, map(_described, results), strict=True))

    found = compiled("ort_train", **given)
    if found != wanted:
        torchs = compiled("aot_eager")
        for name, one in wanted.items():
            for place, (ours, eager, theirs) in enumerate(zip(found[name], one, torchs[name], strict=True)):
                if ours != eager == theirs:
                    yield f"{name}, result {place}: {ours}, eager: {eager}"


PLACEMENTS = {"sessions": {"options": {"placement": "onnxruntime"}}, "default": {}}


FORMS = [*itertools.product(SHAPES, LAYOUTS, PLACEMENTS)]


@pytest.mark.parametrize(
    ("shape", "layout", "placement"),
    [pytest.param(*form, marks=[] if index % 7 == 2 else pytest.mark.slow) for index, form in enumerate(FORMS)],
    ids=str,
)
def test_results_have_eagers_strides(shape: tuple[int, ...], layout: str, placement: str) -> None:
    table = {**UNARY, **(IMAGES if len(shape) > 3 else {})}
    assert not [*_differences(table, [LAYOUTS[layout](torch.rand(shape))], **PLACEMENTS[placement])]


PAIRS = [*itertools.product(LAYOUTS, repeat=2)]


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(*pair, marks=[] if index % 19 == 1 else pytest.mark.slow) for index, pair in enumerate(PAIRS)],
)
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_results_of_two_layouts_have_eagers_strides(shape: tuple[int, ...], first: str, second: str) -> None:
    operands = [LAYOUTS[first](torch.rand(shape)), LAYOUTS[second](torch.rand(shape))]
    unlike = (
        ("ldexp", "losses") if first.startswith("expanded") else ()
    )  # contiguous in eager, with ldexp and huber_loss
    table = {name: function for name, function in BINARY.items() if name not in unlike}
    assert not [*_differences(table, operands, options={"placement": "onnxruntime"})]


COMPOSITE = frozenset(
    ("sinc", "nan_to_num", "xlogy", "xlog1py", "addr", "taken", "joined", "flipped", "compared", "masked", "gradients")
)
"""Operators that are decomposed, with layouts other than eager's, which shows in dimensions of one element."""

ONES = [*itertools.product([*OF_ONE, (2, 0, 3)], ["contiguous", "transposed", "rotated", "channels_last"])]


@pytest.mark.parametrize(
    ("shape", "layout"),
    [pytest.param(*form, marks=[] if index % 5 == 1 else pytest.mark.slow) for index, form in enumerate(ONES)],
    ids=str,
)
def test_dimensions_of_one_element_have_eagers_strides(shape: tuple[int, ...], layout: str) -> None:
    x = LAYOUTS[layout](torch.rand(shape))
    for table, operands in ((UNARY, [x]), (BINARY, [x, torch.rand(shape)])):
        simple = {name: function for name, function in table.items() if name not in COMPOSITE}
        assert not [*_differences(simple, operands, options={"placement": "onnxruntime"})]
