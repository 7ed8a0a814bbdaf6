"""Section 2.6 of the reference: the formulas that trainers are held to equal torch's optimizers where these agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from formulas import adam_step, hyperparameters_of, lamb_step, scale_of, sgd_step

from ort_dynamo import optim

STEPS = 5


def gradients(seed: int = 0) -> list[np.ndarray[Any, Any]]:
    return list(np.random.default_rng(seed).normal(size=(STEPS, 4, 3)))


def by_torch(kind: Any, start: np.ndarray[Any, Any], **settings: Any) -> torch.Tensor:
    weight = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = kind([weight], **settings)
    for gradient in gradients():
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    return weight.detach()


def by_formula(step: Any, start: np.ndarray[Any, Any], **settings: Any) -> np.ndarray[Any, Any]:
    w, m, v = start, np.zeros_like(start), np.zeros_like(start)
    for t, gradient in enumerate(gradients(), start=1):
        w, m, v = step(w, m, v, t, gradient, **settings)
    return w


START = np.random.default_rng(1).normal(size=(4, 3))
SETTINGS = {"lr": 0.1, "alpha": 0.8, "beta": 0.99, "lambda_coef": 0.05, "epsilon": 1e-3}


def test_decay_before_the_update_is_torchs_adamw() -> None:
    expected = by_torch(torch.optim.AdamW, START, lr=0.1, betas=(0.8, 0.99), weight_decay=0.05, eps=1e-3)
    np.testing.assert_allclose(by_formula(adam_step, START, **SETTINGS), expected, rtol=1e-12)


@pytest.mark.parametrize("corrected", [True, False])
def test_decay_after_the_update_is_the_former_adamw_of_transformers(corrected: bool) -> None:
    weight = torch.tensor(START, dtype=torch.float32, requires_grad=True)
    settings: dict[str, Any] = {"betas": (0.8, 0.99), "weight_decay": 0.05, "eps": 1e-3}
    fused = optim.FusedAdam([weight], lr=0.1, bias_correction=corrected, **settings)
    for gradient in gradients():
        weight.grad = torch.tensor(gradient, dtype=torch.float32)
        fused.step()
    found = by_formula(adam_step, START, **SETTINGS, do_bias_correction=corrected, weight_decay_mode=1)
    np.testing.assert_allclose(found, weight.detach(), rtol=2e-5, atol=1e-6)


def test_without_the_correction_of_the_bias_the_first_moments_are_taken_as_they_are() -> None:
    w, m, v = adam_step([1.0], [0.0], [0.0], 1, [2.0], 0.5, 0.75, 0.9, 0.0, 0.0, do_bias_correction=False)
    assert m.item() == 0.5
    assert v.item() == pytest.approx(0.4)
    assert w.item() == pytest.approx(1 - 0.5 * 0.5 / 0.4**0.5)


@pytest.mark.parametrize("corrected", [True, False])
def test_lamb_with_its_ratio_held_at_one_is_adam(corrected: bool) -> None:
    adam = by_formula(adam_step, START, **SETTINGS, do_bias_correction=corrected)
    lamb = by_formula(lamb_step, START, **SETTINGS, do_bias_correction=corrected, ratio_min=1.0, ratio_max=1.0)
    np.testing.assert_allclose(lamb, adam, rtol=1e-13)


def test_lamb_moves_a_weight_by_a_fraction_of_its_own_norm() -> None:
    w, _, _ = lamb_step(START, 0 * START, 0 * START, 1, gradients()[0], lr=0.01)
    assert np.linalg.norm(w - START) == pytest.approx(0.01 * np.linalg.norm(START))
    less, _, _ = lamb_step(START, 0 * START, 0 * START, 1, gradients()[0], lr=0.01, ratio_max=1e-3)
    np.testing.assert_allclose(less - START, (w - START) * np.linalg.norm(less - START) / np.linalg.norm(w - START))
    assert np.linalg.norm(less - START) < np.linalg.norm(w - START)
    more, _, _ = lamb_step(START, 0 * START, 0 * START, 1, gradients()[0], lr=0.01, ratio_min=1e3)
    assert np.linalg.norm(more - START) > np.linalg.norm(w - START)


def test_lamb_treats_nonfinite_updates_as_zero_and_zero_weights_by_the_learning_rate() -> None:
    w, _, _ = lamb_step([1.0, 2.0], [0.0, 0.0], [0.0, 0.0], 1, [0.0, 1.0], lr=0.1, epsilon=0.0)
    assert w[0] == 1.0
    assert w[1] == pytest.approx(2 - 0.1 * 5**0.5)
    zero, _, _ = lamb_step([0.0], [0.0], [0.0], 1, [1.0], lr=0.1, alpha=0.0, beta=0.0, epsilon=0.0)
    assert zero.item() == pytest.approx(-0.1)
    still, _, _ = lamb_step([3.0], [0.0], [0.0], 1, [0.0], lr=0.1)
    assert still.item() == 3.0


def test_gradient_descent_is_torchs() -> None:
    found = START
    for gradient in gradients():
        found = sgd_step(found, gradient, 0.1)
    np.testing.assert_allclose(found, by_torch(torch.optim.SGD, START, lr=0.1), rtol=1e-14)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipped_gradients_have_torchs_norm(max_norm: float) -> None:
    scaled = [8.0 * gradient for gradient in gradients()]
    scale, finite = scale_of(scaled, 8.0, max_norm, clip=True)
    assert finite
    weights = [torch.zeros(4, 3, dtype=torch.float64, requires_grad=True) for _ in scaled]
    for weight, gradient in zip(weights, gradients(), strict=True):
        weight.grad = torch.tensor(gradient)
    torch.nn.utils.clip_grad_norm_(weights, max_norm)
    for weight, gradient in zip(weights, scaled, strict=True):
        assert weight.grad is not None
        np.testing.assert_allclose(gradient / scale, weight.grad, rtol=1e-5)  # torch adds 1e-6 to the norm
    assert scale_of(scaled, 8.0, max_norm, clip=False) == (8.0, True)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_norm_that_is_not_finite_is_told(bad: float) -> None:
    assert not scale_of([[1.0], [bad]], 4.0, 1.0, clip=True)[1]
    assert not scale_of([[1.0], [bad]], 4.0, 1.0, clip=False)[1]


def test_a_weight_has_the_hyperparameters_of_its_group() -> None:
    config = optim.AdamConfig([{"params": ["a", "b"], "lambda_coef": 0.5}], alpha=0.3)
    assert hyperparameters_of("b", config)["lambda_coef"] == 0.5
    assert hyperparameters_of("b", config)["alpha"] == 0.3
    assert hyperparameters_of("c", config)["lambda_coef"] == 0.0
    w, _, _ = adam_step([1.0], [0.0], [0.0], 1, [0.0], **hyperparameters_of("a", config))
    assert w.item() == pytest.approx(1 - 0.001 * 0.5)
    lamb_step([1.0], [0.0], [0.0], 1, [0.0], **hyperparameters_of("a", optim.LambConfig()))
