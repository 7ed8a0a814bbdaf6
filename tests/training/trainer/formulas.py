"""The updates of the optimizers as formulas in float64, written from the reference and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
State = tuple[Array, Array, Array]


def scale_of(grads_scaled: Iterable[Any], loss_scale: float, max_norm: float, clip: bool) -> tuple[float, bool]:
    """The divisor of scaled gradients, and whether the norm of all of them is finite.

    Without a loss scale, loss_scale is 1. Where the norm is not finite nothing is updated.
    """
    norm = float(np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in grads_scaled)))
    if clip and norm > loss_scale * max_norm:
        return norm / max_norm, bool(np.isfinite(norm))
    return loss_scale, bool(np.isfinite(norm))


def sgd_step(w: Any, g: Any, lr: float) -> Array:
    """w after one update."""
    return np.asarray(np.asarray(w, np.float64) - lr * np.asarray(g, np.float64))


def adam_step(
    w: Any,
    m: Any,
    v: Any,
    t: int,
    g_hat: Any,
    lr: float,
    alpha: float = 0.9,
    beta: float = 0.999,
    lambda_coef: float = 0.0,
    epsilon: float = 1e-8,
    do_bias_correction: bool = True,
    weight_decay_mode: int = 0,
) -> State:
    """w, m and v after the t-th update, counted from 1, by the gradient without loss scale, clipped."""
    w, m, v = np.asarray(w, np.float64), *_moments(m, v, g_hat, alpha, beta)
    a, b = _corrections(t, alpha, beta, do_bias_correction)
    if weight_decay_mode == 0:
        return w - lr * ((m / a) / (np.sqrt(v / b) + epsilon) + lambda_coef * w), m, v
    u = lr * (np.sqrt(b) / a) * m / (np.sqrt(v) + epsilon)
    return w - u - lr * lambda_coef * (w - u), m, v


def lamb_step(
    w: Any,
    m: Any,
    v: Any,
    t: int,
    g_hat: Any,
    lr: float,
    alpha: float = 0.9,
    beta: float = 0.999,
    lambda_coef: float = 0.0,
    ratio_min: float = -np.inf,
    ratio_max: float = np.inf,
    epsilon: float = 1e-6,
    do_bias_correction: bool = False,
) -> State:
    """w, m and v of one weight after the t-th update, counted from 1, by the gradient without loss scale, clipped."""
    w, m, v = np.asarray(w, np.float64), *_moments(m, v, g_hat, alpha, beta)
    a, b = _corrections(t, alpha, beta, do_bias_correction)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        d = (m / a) / (np.sqrt(v / b) + epsilon) + lambda_coef * w
    d = np.where(np.isfinite(d), d, 0.0)
    w_norm, d_norm = np.sqrt(np.square(w).sum()), np.sqrt(np.square(d).sum())
    ratio = min(max(w_norm / d_norm, ratio_min), ratio_max) if w_norm != 0 and d_norm != 0 else 1.0
    return w - lr * ratio * d, m, v


def hyperparameters_of(name: str, config: Any) -> dict[str, Any]:
    """The hyperparameters of a weight: those of the group that names it, or the defaults, as the steps' arguments."""
    found = next((group for group in config.params if name in group["params"]), config.defaults)
    steps = {"lambda_coef" if key == "lambda" else key: value for key, value in found.items()}
    return {key: value for key, value in steps.items() if key not in ("params", "max_norm_clip")}


def _moments(m: Any, v: Any, g: Any, alpha: float, beta: float) -> tuple[Array, Array]:
    g = np.asarray(g, np.float64)
    m = alpha * np.asarray(m, np.float64) + (1 - alpha) * g
    return m, beta * np.asarray(v, np.float64) + (1 - beta) * np.square(g)


def _corrections(t: int, alpha: float, beta: float, corrected: bool) -> tuple[float, float]:
    return (1 - alpha**t, 1 - beta**t) if corrected else (1.0, 1.0)
