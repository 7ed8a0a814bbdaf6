"""Section 1.8 of ORTModule's reference: FusedAdam and FP16_Optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ort_dynamo import optim
from ort_dynamo.training.optim import AdamWMode, FP16_Optimizer, FusedAdam


def run(optimizer: torch.optim.Optimizer, weights: list[Tensor], steps: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return [weight.detach() for weight in weights]


def weights() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 3, requires_grad=True), torch.randn(5, requires_grad=True)]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("mode", "kind"), [(0, torch.optim.Adam), (2, torch.optim.AdamW)])
def test_two_modes_are_torchs(mode: int, kind: type[torch.optim.Optimizer], decay: float) -> None:
    mine, theirs = weights(), weights()
    found = run(FusedAdam(mine, lr=0.01, eps=1e-6, adam_w_mode=mode, weight_decay=decay), mine)
    expected = run(kind(theirs, lr=0.01, eps=1e-6, weight_decay=decay), theirs)  # type: ignore[call-arg]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("corrected", [True, False])
def test_the_default_is_transformers_former_adamw(corrected: bool) -> None:
    mine, theirs = weights(), weights()
    lr, eps, decay, (beta1, beta2) = 0.01, 1e-6, 0.1, (0.9, 0.999)
    run(FusedAdam(mine, lr=lr, bias_correction=corrected, weight_decay=decay), mine)
    generator = torch.Generator().manual_seed(0)
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in theirs]
    for step in range(1, 6):
        for weight, (mean, square) in zip(theirs, moments, strict=True):
            gradient = torch.randn(weight.shape, generator=generator)
            with torch.no_grad():
                mean.mul_(beta1).add_(gradient * (1 - beta1))
                square.mul_(beta2).add_(gradient**2 * (1 - beta2))
                size = lr * (math.sqrt(1 - beta2**step) / (1 - beta1**step) if corrected else 1)
                weight -= size * mean / (square.sqrt() + eps)
                weight -= lr * decay * weight
    torch.testing.assert_close([w.detach() for w in mine], [w.detach() for w in theirs], rtol=1e-6, atol=1e-7)


def test_gradients_are_forgotten_and_a_closure_runs() -> None:
    (weight, _) = weights()
    optimizer = FusedAdam([weight], set_grad_none=False)
    run(optimizer, [weight], 1)
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad is not None
    assert not weight.grad.any()
    optimizer.zero_grad()
    assert weight.grad is None

    def closure() -> Tensor:
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    state = optimizer.state_dict()
    other = FusedAdam([weight])
    other.load_state_dict(state)
    assert other.param_groups[0]["step"] == 2


def test_fused_adam_refuses_sparse_and_float64_gradients() -> None:
    sparse = torch.randn(3, 2, requires_grad=True)
    sparse.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (3, 2), check_invariants=True)
    with pytest.raises(RuntimeError, match="FusedAdam does not support sparse gradients"):
        FusedAdam([sparse]).step()
    wide = torch.randn(3, dtype=torch.float64, requires_grad=True)
    wide.grad = torch.ones_like(wide)
    with pytest.raises(RuntimeError, match=r"FusedAdam only support fp16 and fp32."):
        FusedAdam([wide]).step()


def test_half_and_single_precision_are_updated_together() -> None:
    half = torch.randn(3).half().requires_grad_()
    single = torch.randn(3, requires_grad=True)
    for weight in (half, single):
        weight.grad = torch.ones_like(weight)
    before = [half.clone(), single.clone()]
    FusedAdam([half, single], lr=0.1, adam_w_mode=AdamWMode.ADAMW_TORCH).step()
    assert not torch.equal(half, before[0])
    torch.testing.assert_close(single, before[1] - 0.1, rtol=1e-4, atol=1e-4)


def test_fp16_optimizer_returns_an_unknown_optimizer() -> None:
    optimizer = torch.optim.SGD(weights(), lr=0.1)
    with pytest.warns(
        UserWarning, match="Skip modifying optimizer because of optimizer name not found in the registry"
    ):
        assert FP16_Optimizer(optimizer, get_tensor_model_parallel_rank=None) is optimizer
    assert optim.FusedAdam is FusedAdam
