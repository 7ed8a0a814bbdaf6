"""FusedAdam: Adam in the three forms of ORTModule's optimizer, by torch's multi-tensor kernels."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

__all__ = ["AdamWMode", "FusedAdam"]


class AdamWMode(IntEnum):
    """The ways in which weights decay."""

    ADAM_L2_REGULARIZATION = 0
    """The decay is part of the gradient, as in torch.optim.Adam."""
    ADAMW_TRANSFORMERS = 1
    """The updated weight decays, and eps is added before the bias is corrected: transformers' former AdamW."""
    ADAMW_TORCH = 2
    """The weight decays, and is updated then, as in torch.optim.AdamW."""


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980) with the weight decay of Loshchilov and Hutter (arXiv:1711.05101).

    All tensors of one dtype are updated together, on any device. Unlike ORTModule's it needs no GPU.

    Args:
        params: parameters, or dicts of groups; float32 or float16.
        lr: learning rate.
        bias_correction: correct the moments' bias.
        betas: coefficients of the running averages of the gradient and of its square.
        eps: added to the denominator. (The old docstring said 1e-8, its code 1e-6.)
        adam_w_mode: the mode of weight decay.
        weight_decay: the factor of the decay.
        set_grad_none: whether zero_grad() always sets gradients to None.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: AdamWMode | int = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self._mode = AdamWMode(adam_w_mode)
        self._set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        super().zero_grad(set_to_none=self._set_grad_none or set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: recomputes the loss and returns it.

        Raises:
            RuntimeError: a gradient is sparse, or a parameter neither float32 nor float16.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._check(parameter)
                    by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            for parameters in by_kind.values():
                self._update(group, parameters)
        return loss

    def _check(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise RuntimeError("FusedAdam does not support sparse gradients, please consider SparseAdam instead")
        if parameter.dtype not in (torch.float16, torch.float32):
            raise RuntimeError("FusedAdam only support fp16 and fp32.")
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        gradients = [p.grad for p in parameters if p.grad is not None]
        means = [self.state[p]["exp_avg"] for p in parameters]
        squares = [self.state[p]["exp_avg_sq"] for p in parameters]
        corrected = group["bias_correction"]
        bias1 = 1 - beta1 ** group["step"] if corrected else 1.0
        bias2 = 1 - beta2 ** group["step"] if corrected else 1.0
        if self._mode is AdamWMode.ADAM_L2_REGULARIZATION and decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        if self._mode is AdamWMode.ADAMW_TORCH and decay:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        denominators = torch._foreach_sqrt(squares)
        step_size = lr / bias1
        if self._mode is AdamWMode.ADAMW_TRANSFORMERS:
            step_size *= bias2**0.5
        else:
            torch._foreach_div_(denominators, bias2**0.5)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(parameters, means, denominators, -step_size)
        if self._mode is AdamWMode.ADAMW_TRANSFORMERS and decay:
            torch._foreach_mul_(parameters, 1 - lr * decay)
