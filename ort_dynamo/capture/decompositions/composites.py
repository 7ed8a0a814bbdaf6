"""These formulas decompose operators for which torch has no decomposition, or one that differs from eager."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ort_dynamo.capture.margin_losses import MARGIN_LOSSES
from ort_dynamo.torch_internals.kernels.decompositions import linspace
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, present

__all__ = ["COMPOSITES"]

_KEY_PADDING = 1  # mask_type: 0 is a mask of scores (L, S), 1 of keys (N, S), 2 of every head's scores (N, H, L, S)


def _probabilities(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, mask_type: int | None
) -> torch.Tensor:
    """softmax(query key' / sqrt(width)); a mask is true, or not zero, where a query must not see a key."""
    scores = (query * query.shape[-1] ** -0.5) @ key.mT
    if mask is not None:
        # A row that is masked as a whole comes out NaN, as in eager.
        hidden = mask[:, None, None, :] if mask_type == _KEY_PADDING and mask.dim() == 2 else mask
        scores = scores.masked_fill(hidden.bool(), -torch.inf)
    return scores.softmax(-1)


def _native_multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> Any:
    """Return the fast path of torch.nn.MultiheadAttention: (N, L, embed_dim) operands of equal shapes."""
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    heads = [
        F.linear(one, weight, bias).reshape(*one.shape[:2], num_head, embed_dim // num_head).transpose(1, 2)
        for one, weight, bias in zip((query, key, value), weights, biases, strict=True)
    ]
    probabilities = _probabilities(heads[0], heads[1], mask, mask_type)
    output = F.linear((probabilities @ heads[2]).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return output, None
    return output, probabilities.mean(1) if average_attn_weights else probabilities


def _transformer_encoder_layer_fwd(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """Return the fast path of torch.nn.TransformerEncoderLayer; src is (N, L, embed_dim)."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        found: torch.Tensor = _native_multi_head_attention(
            x, x, x, embed_dim, num_heads, *projections, mask, need_weights=False, mask_type=mask_type
        )[0]
        return found

    def feed(x: torch.Tensor) -> torch.Tensor:
        inner = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(inner) if use_gelu else F.relu(inner), ffn_weight_2, ffn_bias_2)

    def first(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(first(src))
        return x + feed(second(x))
    x = first(src + attend(src))
    return second(x + feed(x))


def _weight_norm_interface_backward(
    grad_w: torch.Tensor, saved_v: torch.Tensor, saved_g: torch.Tensor, saved_norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of w = v g / |v|, the norm taken over all dimensions but one.

    T. Salimans and D. Kingma, Weight Normalization, 2016, equation 3.
    """
    others = [axis for axis in range(saved_v.dim()) if axis != dim % saved_v.dim()]
    grad_g = (grad_w * saved_v).sum(others, keepdim=True) / saved_norms
    grad_v = (saved_g / saved_norms) * (grad_w - saved_v * (grad_g / saved_norms))
    return grad_v, grad_g


def _linspace(
    start: float | torch.Tensor,
    end: float | torch.Tensor,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    **place: Any,
) -> torch.Tensor:
    """torch's decomposition, but for integers as in eager: ends are rounded towards zero, the rest is in float64."""
    if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        start, end = (
            x.to(dtype) if isinstance(x, torch.Tensor) else torch.scalar_tensor(math.trunc(x), dtype=torch.float64)
            for x in (start, end)
        )
    return linspace(start, end, steps, dtype=dtype, **place)


def _bernoulli(self: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Give 1 with probability `self`, else 0, by a random op that reads no data and a comparison.

    On the CPU the random numbers are eager's: one per element, in the order of a contiguous tensor, in float64 or
    float32. CUDA's kernel uses another order.
    """
    if generator is not None or self.device.type != "cpu" or not self.is_floating_point():
        return NotImplemented
    aten._assert_async.msg(((self >= 0) & (self <= 1)).all(), "Expected p_in >= 0 && p_in <= 1 to be true")
    wide = torch.promote_types(self.dtype, torch.float32)
    return (torch.rand(self.shape, dtype=wide, device=self.device) < self).to(self.dtype)


def _normal(
    mean: float | torch.Tensor, std: float | torch.Tensor = 1.0, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """mean + std N(0, 1) in the mean's dtype, rounded where eager rounds: a scalar `std` is part of the random op."""
    if generator is not None:
        return NotImplemented
    if not isinstance(std, torch.Tensor):
        assert isinstance(mean, torch.Tensor)
        return torch.normal(0.0, std, mean.shape, dtype=mean.dtype, device=mean.device) + mean
    aten._assert_async.msg((std >= 0).all(), "normal expects all elements of std >= 0.0")
    like = mean.expand_as(mean + std) if isinstance(mean, torch.Tensor) else std
    scaled = torch.randn(like.shape, dtype=like.dtype, device=like.device) * std
    return (scaled.to(like.dtype) + mean).to(like.dtype)


def _multinomial(
    self: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return the indices of the largest p / q, with q from Exp(1): eager's way to sample without replacement.

    Half dtypes are not decomposed: eager rounds quotients, so that some are equal, and here another index could win.
    """
    wide = self.dtype in (torch.float32, torch.float64)
    if generator is not None or not wide or (replacement and num_samples != 1):
        return NotImplemented
    categories = self.shape[-1]
    for holds, otherwise in (
        (num_samples > 0, "cannot sample n_sample <= 0 samples"),
        (num_samples <= categories, "cannot sample n_sample > prob_dist.size(-1) samples without replacement"),
        (categories <= 1 << 24, "number of categories cannot exceed 2^24"),
    ):
        torch._check(holds, lambda: otherwise)  # type: ignore[no-untyped-call]  # noqa: B023
    valid = ((self < torch.inf) & (self >= 0)).all()
    aten._assert_async.msg(valid, "probability tensor contains either `inf`, `nan` or element < 0")
    aten._assert_async.msg((self.sum(-1) != 0).all(), "invalid multinomial distribution (sum of probabilities <= 0)")
    quotients = self / aten.exponential.default(torch.empty_like(self), 1.0)
    return quotients.argmax(-1, keepdim=True) if num_samples == 1 else quotients.topk(num_samples).indices


def _rrelu_with_noise_functional(
    self: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompose rrelu in evaluation only: in training, eager generates numbers for negative elements alone."""
    if training:
        return NotImplemented
    return F.leaky_relu(self, (lower + upper) / 2), noise.clone()


def _cholesky_solve(self: torch.Tensor, input2: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """Return the solution X of A X = self, A = L L' given by its factor: two triangular systems."""
    lower = input2.mH if upper else input2
    inner = torch.linalg.solve_triangular(lower, self, upper=False)
    return torch.linalg.solve_triangular(lower.mH, inner, upper=True)


def _cholesky_inverse(self: torch.Tensor, upper: bool = False) -> torch.Tensor:
    """Return the inverse of A = L L', given by its factor."""
    nonzero = (self.diagonal(dim1=-2, dim2=-1) != 0).all()
    aten._assert_async.msg(nonzero, "cholesky_inverse: a diagonal element is zero, the inverse could not be completed.")
    identity = torch.eye(self.shape[-1], dtype=self.dtype, device=self.device)
    return _cholesky_solve(identity.expand(self.shape), self, upper)


def _triangular_solve(
    self: torch.Tensor, a: torch.Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the deprecated form: a transposed system is one with the other triangle."""
    system = a.mT if transpose else a
    solution = torch.linalg.solve_triangular(system, self, upper=upper != transpose, unitriangular=unitriangular)
    columns = a.expand(*solution.shape[:-2], *a.shape[-2:]).mT.contiguous()
    return solution, columns.mT  # in LAPACK's order, as eager's copy


COMPOSITES: Mapping[OpOverload, Callable[..., Any]] = present(
    {
        aten._native_multi_head_attention.default: _native_multi_head_attention,
        aten._transformer_encoder_layer_fwd.default: _transformer_encoder_layer_fwd,
        aten._weight_norm_interface_backward.default: _weight_norm_interface_backward,
        aten.cholesky_inverse.default: _cholesky_inverse,
        aten.cholesky_solve.default: _cholesky_solve,
        aten.triangular_solve.default: _triangular_solve,
        aten.linspace.default: _linspace,
        aten.linspace.Tensor_Tensor: _linspace,
        aten.linspace.Tensor_Scalar: _linspace,
        aten.linspace.Scalar_Tensor: _linspace,
        aten.bernoulli.default: _bernoulli,
        aten.multinomial.default: _multinomial,
        aten.normal.Tensor_Tensor: _normal,
        aten.normal.Tensor_float: _normal,
        aten.normal.float_Tensor: _normal,
        aten.rrelu_with_noise_functional.default: _rrelu_with_noise_functional,
        **MARGIN_LOSSES,  # reached in inference mode, without the kernels at the Autograd key
    }
)
"""Overload -> its formula, with the overload's own arguments."""
