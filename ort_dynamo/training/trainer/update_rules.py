"""The formulae of ORTTrainer's optimizers, on tensors: traced into a training graph, or run by torch.

The formulae are those of ONNX Runtime's AdamOptimizer, LambOptimizer and SGDOptimizer kernels. Coefficients that depend
on the number of updates are computed in float64: in float32, 1 - 0.999 alone is off by 6e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AdamRule", "LambRule", "Rule", "SGDRule", "Updated", "gradient_divisor", "gradient_norm"]


@dataclass(frozen=True)
class Updated:
    """The results of an update of some weights.

    Attributes:
        weights: the new weights, in the dtype that they had.
        moments: for each moment of the optimizer, its new values, one for each weight.
    """

    weights: list[Tensor]
    moments: list[list[Tensor]]


@dataclass(frozen=True)
class SGDRule:
    """w ← w - η·g."""

    max_norm_clip: float | None = None

    moments: int = 0

    def update(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        count: Tensor,
        lr: Tensor,
    ) -> Updated:
        """Compute the new weights.

        Args:
            weights: float32 or float64.
            gradients: one for each weight, not scaled any more.
            moments: none.
            count: int64, 0-d: how many updates there are with this one; unused.
            lr: float64, 0-d: the learning rate η.
        """
        return Updated([w - lr.to(w.dtype) * g for w, g in zip(weights, gradients, strict=True)], [])


@dataclass(frozen=True)
class AdamRule:
    """Adam with weight decay before or after the update.

    m ← αm + (1-α)g; v ← βv + (1-β)g²; a = 1-αᵗ, b = 1-βᵗ, or both 1 without bias correction.
    Before: w ← w - η((m/a) / (√(v/b)+ε) + λw). After, as in Hugging Face's AdamW: u = η(√b/a)·m/(√v+ε); w ← w - u;
    w ← w - ηλw.

    Attributes:
        max_norm_clip: the norm that all gradients together are clipped to; None does not clip.
        alpha: α.
        beta: β.
        lambda_coef: λ.
        epsilon: ε.
        do_bias_correction: whether a and b are computed.
        decay_after: whether weights decay after the update.
    """

    max_norm_clip: float | None
    alpha: float
    beta: float
    lambda_coef: float
    epsilon: float
    do_bias_correction: bool
    decay_after: bool

    moments: int = 2

    def update(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        count: Tensor,
        lr: Tensor,
    ) -> Updated:
        """Compute the new weights and moments; arguments as for `SGDRule.update`, with `moments` m and v."""
        a, b = _corrections(self, count)
        root = b.sqrt()
        kept = 1 - lr * self.lambda_coef
        rate = lr * root / a if self.decay_after else lr / a
        made = Updated([], [[], []])
        for w, g, m, v in zip(weights, gradients, *moments, strict=True):
            m = m * self.alpha + g * (1 - self.alpha)
            v = v * self.beta + g * g * (1 - self.beta)
            deviation = v.sqrt()
            if self.do_bias_correction and not self.decay_after:
                deviation = deviation / root.to(w.dtype)
            step = rate.to(w.dtype) * (m / (deviation + self.epsilon))
            if not self.lambda_coef:
                w = w - step
            elif self.decay_after:
                w = (w - step) * kept.to(w.dtype)
            else:
                w = w * kept.to(w.dtype) - step
            made.weights.append(w)
            made.moments[0].append(m)
            made.moments[1].append(v)
        return made


@dataclass(frozen=True)
class LambRule:
    """LAMB: Adam's direction with weight decay, scaled for each weight by the ratio of two norms.

    m, v, a and b as for Adam. d = (m/a) / (√(v/b)+ε) + λw, if that is finite, else 0;
    r = η·clamp(‖w‖/‖d‖, ratio_min, ratio_max) if both norms are nonzero, else η; w ← w - r·d.

    Attributes:
        ratio_min: the minimum ratio of the norms.
        ratio_max: the maximum ratio.
        max_norm_clip, alpha, beta, lambda_coef, epsilon, do_bias_correction: as for Adam.
    """

    max_norm_clip: float | None
    alpha: float
    beta: float
    lambda_coef: float
    epsilon: float
    do_bias_correction: bool
    ratio_min: float = -math.inf
    ratio_max: float = math.inf

    moments: int = 2

    def update(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        count: Tensor,
        lr: Tensor,
        norm: Callable[[Tensor], Tensor] | None = None,
    ) -> Updated:
        """Compute the new weights and moments.

        Args:
            weights, gradients, moments, count, lr: as for `SGDRule.update`, with `moments` m and v.
            norm: computes the norm of a weight of which `weights` has a part; None computes it of that part alone.
        """
        norm = norm or _norm
        a, b = _corrections(self, count)
        root = b.sqrt()
        made = Updated([], [[], []])
        for w, g, m, v in zip(weights, gradients, *moments, strict=True):
            m = m * self.alpha + g * (1 - self.alpha)
            v = v * self.beta + g * g * (1 - self.beta)
            if self.do_bias_correction:
                d = (m / a.to(w.dtype)) / (v.sqrt() / root.to(w.dtype) + self.epsilon)
            else:
                d = m / (v.sqrt() + self.epsilon)
            if self.lambda_coef:
                d = d + w * self.lambda_coef
            d = torch.where(d.isfinite(), d, torch.zeros_like(d))
            of_weight, of_step = norm(w), norm(d)
            ratio = of_weight / of_step
            if self.ratio_min > -math.inf or self.ratio_max < math.inf:
                ratio = ratio.clamp(self.ratio_min, self.ratio_max)
            ratio = torch.where((of_weight != 0) & (of_step != 0), ratio, torch.ones_like(ratio))
            made.weights.append(w - (lr.to(w.dtype) * ratio) * d)
            made.moments[0].append(m)
            made.moments[1].append(v)
        return made


Rule = SGDRule | AdamRule | LambRule


def _corrections(rule: AdamRule | LambRule, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and b, float64."""
    t = count.double()
    if not rule.do_bias_correction:
        return torch.ones_like(t), torch.ones_like(t)
    return 1 - rule.alpha**t, 1 - rule.beta**t


def _norm(tensor: Tensor) -> Tensor:
    return (tensor * tensor).sum().sqrt()


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Compute the norm of all gradients together, float64 and 0-d; not finite where one of them is not."""
    return torch.stack([(g * g).sum() for g in gradients]).double().sum().sqrt()


def gradient_divisor(norm: Tensor, scale: Tensor, max_norm: float | None) -> Tensor:
    """Compute the divisor of gradients, so that they lose their scale and their norm is at most max_norm.

    s = N/max_norm if N > S·max_norm, else S, of the norm N of the scaled gradients and the loss scale S.

    Args:
        norm: N, float64, 0-d.
        scale: S, float64, 0-d.
        max_norm: None does not clip.
    """
    if max_norm is None:
        return scale
    return torch.where(norm > scale * max_norm, norm / max_norm, scale)
