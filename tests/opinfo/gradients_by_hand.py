"""Functions whose gradients check the lowerings that no small sample of PyTorch's database reaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gradients import Case, with_work
from torch import Tensor

from ort_dynamo.torch_internals.kernels.operators import aten, prims

__all__ = ["WRITTEN", "Written"]

INDEX = torch.tensor([0, 2, 1, 2, 3])
OFFSETS = torch.tensor([0, 2])
QUERIES = ((1, 2, 3, 4),) * 3
NORM = ((2, 3, 2), (3,), (3,))


@dataclass(frozen=True)
class Written:
    """A function of tensors, with the lowerings that it runs.

    Attributes:
        overloads: their names, without "aten.".
        function: the function.
        shapes: the shapes of its arguments, all of which vary.
        lowest: the lowest entry of an argument; None for normal numbers.
    """

    overloads: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    lowest: float | None = None

    @property
    def names(self) -> frozenset[str]:
        """The overloads' full names."""
        return frozenset(name if name.startswith("prims.") else f"aten.{name}" for name in self.overloads.split())

    def case(self) -> Case:
        """Make the arguments."""
        torch.manual_seed(0)
        made = [
            torch.randn(shape, dtype=torch.float64)
            if self.lowest is None
            else torch.rand(shape, dtype=torch.float64) + self.lowest
            for shape in self.shapes
        ]
        arguments = tuple(one.requires_grad_() for one in made)
        return Case(with_work(self.function), arguments, (sum(one.numel() for one in arguments), 0))


class _DenseBag(torch.autograd.Function):
    """A sum of rows; its gradient is the operator that torch calls below the one that it traces."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        result, offset2bag, size, largest = aten._embedding_bag(weight, INDEX, OFFSETS)
        ctx.save_for_backward(offset2bag, size, largest)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        bags = ctx.saved_tensors
        return aten._embedding_bag_dense_backward(grad, INDEX, *bags, 4, False, 0, None)


def _ones(*sizes: int) -> Tensor:
    return torch.ones(sizes, dtype=torch.float64)


def _zeros(*sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.float64)


def _max_bags(weight: Tensor) -> Tensor:
    return F.embedding_bag(INDEX, weight, OFFSETS, mode="max")


def _weighted_bags(weight: Tensor, scale: Tensor) -> Tensor:
    return F.embedding_bag(INDEX, weight, OFFSETS, mode="sum", per_sample_weights=scale)


def _nll(x: Tensor) -> Tensor:
    return F.nll_loss(x, torch.tensor([[[0, 2], [1, 1]]]), weight=_ones(3) / 2)


def _resized(mode: str, size: int | tuple[int, ...], **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, size=size, mode=mode, **options)


def _padded(mode: str, pad: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    return lambda x: F.pad(x, pad, mode=mode)


def _attention(name: str, *arguments: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: getattr(aten, name).default(q, k, v, *arguments)[0]


IMAGE, VOLUME = ((1, 1, 4, 3),), ((1, 1, 2, 2, 3),)

WRITTEN: tuple[Written, ...] = (
    Written(
        "_adaptive_avg_pool3d.default _adaptive_avg_pool3d_backward.default",
        lambda x: F.adaptive_avg_pool3d(x, (1, 2, 2)),
        VOLUME,
    ),
    Written(
        "_batch_norm_no_update.default batch_norm_backward.default",
        lambda x, w, b: aten._batch_norm_no_update.default(x, w, b, _zeros(3), _ones(3), 0.1, 1e-5)[0],
        NORM,
    ),
    Written(
        "_batch_norm_with_update_functional.default",
        lambda x, w, b: aten._batch_norm_with_update.default(x, w, b, _zeros(3), _ones(3), 0.1, 1e-5)[0],
        NORM,
    ),
    Written(
        "_native_batch_norm_legit_functional.default native_batch_norm_backward.default",
        lambda x, w, b: F.batch_norm(x, _zeros(3), _ones(3), w, b, True),
        NORM,
    ),
    Written(
        "_native_batch_norm_legit_no_training.default",
        lambda x, w, b: F.batch_norm(x, _zeros(3), _ones(3), w, b),
        NORM,
    ),
    Written("_embedding_bag.default _embedding_bag_backward.default", _max_bags, ((4, 2),)),
    Written("_embedding_bag_per_sample_weights_backward.default", _weighted_bags, ((4, 2), (5,))),
    Written("_embedding_bag_dense_backward.default", _DenseBag.apply, ((4, 2),)),
    Written("_neg_view.default", torch._neg_view, ((2, 3),)),
    Written("_neg_view_copy.default", aten._neg_view_copy.default, ((2, 3),)),
    Written("_reshape_alias.default", lambda x: aten._reshape_alias.default(x, [3, 2], [2, 1]), ((2, 3),)),
    Written("_reshape_copy.default", lambda x: aten._reshape_copy.default(x, [3, 2]), ((2, 3),)),
    Written(
        "_scaled_dot_product_cudnn_attention.default _scaled_dot_product_cudnn_attention_backward.default",
        _attention("_scaled_dot_product_cudnn_attention", None, True),
        QUERIES,
    ),
    Written(
        "_scaled_dot_product_efficient_attention.default _scaled_dot_product_efficient_attention_backward.default",
        lambda q, k, v, bias: aten._scaled_dot_product_efficient_attention.default(q, k, v, bias, True)[0],
        (*QUERIES, (1, 2, 3, 3)),
    ),
    Written(
        "_scaled_dot_product_flash_attention_for_cpu.default"
        " _scaled_dot_product_flash_attention_for_cpu_backward.default",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        QUERIES,
    ),
    Written(
        "_scaled_dot_product_fused_attention_overrideable.default"
        " _scaled_dot_product_fused_attention_overrideable_backward.default",
        _attention("_scaled_dot_product_fused_attention_overrideable"),
        QUERIES,
    ),
    Written(
        "_upsample_bicubic2d_aa.default _upsample_bicubic2d_aa_backward.default",
        _resized("bicubic", (3, 2), antialias=True),
        IMAGE,
    ),
    Written(
        "_upsample_lanczos2d_aa.default _upsample_lanczos2d_aa_backward.default",
        lambda x: aten._upsample_lanczos2d_aa.default(x, [3, 2], False),
        IMAGE,
    ),
    Written(
        "_upsample_nearest_exact2d.default _upsample_nearest_exact2d_backward.default",
        _resized("nearest-exact", (3, 5)),
        IMAGE,
    ),
    Written(
        "_upsample_nearest_exact3d.default _upsample_nearest_exact3d_backward.default",
        _resized("nearest-exact", (1, 3, 2)),
        VOLUME,
    ),
    Written(
        "upsample_nearest2d.default upsample_nearest2d_backward.default",
        _resized("nearest", (3, 5)),
        IMAGE,
    ),
    Written(
        "upsample_nearest3d.default upsample_nearest3d_backward.default",
        _resized("nearest", (1, 3, 2)),
        VOLUME,
    ),
    Written("affine_grid_generator.default", lambda x: F.affine_grid(x, [1, 2, 3, 2], False), ((1, 2, 3),)),
    Written("alias_copy.default", aten.alias_copy.default, ((2, 3),)),
    Written("as_strided_copy.default", lambda x: aten.as_strided_copy.default(x, [2, 2], [1, 2]), ((2, 3),)),
    Written("clamp.default", lambda x: x.clamp(-0.5, 0.5), ((3, 4),)),
    Written("clamp_max.default", lambda x: x.clamp_max(0.5), ((3, 4),)),
    Written("copysign.Scalar", lambda x: torch.copysign(x, -2.0), ((3, 4),)),
    Written("diagonal_copy.default", aten.diagonal_copy.default, ((2, 3),)),
    Written("div.Scalar_mode", lambda x: aten.div.Scalar_mode(x, 2.0, rounding_mode=None), ((3, 4),)),
    Written("expand_copy.default", lambda x: aten.expand_copy.default(x, [2, 2, 3]), ((2, 3),)),
    Written("fill.Tensor", aten.fill.Tensor, ((3, 4), ())),
    Written("fmod.Scalar", lambda x: torch.fmod(x, 0.7), ((3, 4),)),
    Written("igamma.default", lambda x: torch.igamma(_ones(3) * 1.3, x), ((3,),), 0.5),
    Written("igammac.default", lambda x: torch.igammac(_ones(3) * 1.3, x), ((3,),), 0.5),
    Written("ldexp.Tensor", lambda x: torch.ldexp(x, torch.tensor([0, 1, 3])), ((3,),)),
    Written("median.dim", lambda x: torch.median(x, 1)[0], ((2, 5),)),
    Written("nll_loss2d_forward.default nll_loss2d_backward.default", _nll, ((1, 3, 2, 2),)),
    Written("permute_copy.default", lambda x: aten.permute_copy.default(x, [1, 0]), ((2, 3),)),
    Written("prims.fma.default", prims.fma.default, ((3,), (3,), (3,))),
    Written(
        "reflection_pad2d.default reflection_pad2d_backward.default",
        _padded("reflect", (1, 2, 0, 1)),
        IMAGE,
    ),
    Written(
        "reflection_pad3d.default reflection_pad3d_backward.default",
        _padded("reflect", (1, 2, 0, 1, 1, 0)),
        VOLUME,
    ),
    Written("remainder.Scalar", lambda x: torch.remainder(x, 0.7), ((3, 4),)),
    Written(
        "replication_pad3d.default replication_pad3d_backward.default",
        _padded("replicate", (1, 2, 0, 1, 1, 0)),
        VOLUME,
    ),
    Written("select_copy.int", lambda x: aten.select_copy.int(x, 0, 1), ((2, 3),)),
    Written("slice_copy.Tensor", lambda x: aten.slice_copy.Tensor(x, 1, 1, 3), ((2, 3),)),
    Written("sort.stable", lambda x: torch.sort(x, stable=True)[0], ((2, 5),)),
    Written("special_zeta.default", lambda y: torch.special.zeta(_ones(3) * 2.5, y), ((3,),), 0.5),
    Written("split_copy.Tensor", lambda x: list(aten.split_copy.Tensor(x, 1)), ((2, 3),)),
    Written("split_with_sizes_copy.default", lambda x: list(aten.split_with_sizes_copy.default(x, [1, 1])), ((2, 3),)),
    Written("squeeze_copy.default", aten.squeeze_copy.default, ((1, 3),)),
    Written("squeeze_copy.dim", lambda x: aten.squeeze_copy.dim(x, 0), ((1, 3),)),
    Written("squeeze_copy.dims", lambda x: aten.squeeze_copy.dims(x, [0, 2]), ((1, 3, 1),)),
    Written("t_copy.default", aten.t_copy.default, ((2, 3),)),
    Written("transpose_copy.int", lambda x: aten.transpose_copy.int(x, 0, 1), ((2, 3),)),
    Written("unbind_copy.int", lambda x: list(aten.unbind_copy.int(x)), ((2, 3),)),
    Written("unfold_copy.default", lambda x: aten.unfold_copy.default(x, 1, 2, 1), ((2, 3),)),
    Written(
        "unsafe_split_with_sizes.default",
        lambda x: list(aten.unsafe_split_with_sizes.default(x, [1, 2])),
        ((3, 2),),
    ),
    Written("unsqueeze_copy.default", lambda x: aten.unsqueeze_copy.default(x, 0), ((2, 3),)),
    Written("view_copy.default", lambda x: aten.view_copy.default(x, [3, 2]), ((2, 3),)),
)
