"""A training step as a forward and a backward in ONNX Runtime, and an update by torch's kernels.

With large weights the update is bound by memory; torch's fused kernel reads and writes each element once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ort_dynamo.embedding import CompileRecord, Options, compile_recorded
from ort_dynamo.training.torch_internals import compile_region, fused_adamw, held_weakly
from ort_dynamo.training.trainer.distributed.process_group import ForwardBackward, Together, ZeroUpdate
from ort_dynamo.training.trainer.training_state import (
    TrainedWeight,
    TrainingState,
    UpdateGroup,
    norm_over,
    square_sum_over,
)
from ort_dynamo.training.trainer.update_rules import AdamRule, LambRule, gradient_divisor, gradient_norm
from ort_dynamo.training.trainer.whole_step import StepKind

__all__ = ["SplitStep"]


class SplitStep:
    """Runs steps, each as a forward, a backward and an update.

    Args:
        called: gives the loss and the outputs of the model; the loss alone of them has a gradient.
        state: the trained state; the steps change it.
        options: how to compile.
        together: the processes that train the model.
        zero: divides the update among them; None where each does all of it.
        recurrent: whether the model has recurrent layers to trace.

    Attributes:
        trained_nothing: whether no step so far had a gradient.
    """

    def __init__(
        self,
        called: Callable[..., Any],
        state: TrainingState,
        options: Options,
        together: Together,
        zero: ZeroUpdate | None = None,
        *,
        recurrent: bool = False,
    ) -> None:
        self._together = together
        self._zero = zero
        self._state = state
        self._options = options
        # torch's tracer recurses endlessly on symbolic sizes with DTensors, so each size has its graph.
        dynamic = False if together.shares_layers else None
        self._region = compile_region(called, held_weakly(self._compile), dynamic=dynamic, recurrent=recurrent)
        self.records: list[CompileRecord] = []
        self.trained_nothing: bool = True

    def __call__(self, inputs: Sequence[Any], lr: float, scale: float, kind: StepKind) -> tuple[Any, bool]:
        """Run one step.

        Args:
            inputs: of the model.
            lr: the learning rate.
            scale: the loss scale.
            kind: the tasks of the step.

        Returns:
            The model's results, the loss first, and whether all gradients were finite: if not, no weight changed.
        """
        together = self._together
        # Where the reduction was put off to a step that updates, that step's gradients are the sums of all steps.
        adds = kind.updates and kind.gathers > 1 and together.postpones
        reduces = kind.updates or not together.postpones
        asked = ForwardBackward(
            self._region,
            inputs,
            self._state.weights,
            scale,
            adds=adds,
            reached=self._state.reached,
            reduces=reduces,
        )
        outputs, found = together.gradients(asked)
        reached = [(w, g) for w, g in zip(self._state.weights, found, strict=True) if g is not None]
        self.trained_nothing &= not (reached or together.has_stages)
        weights = [weight for weight, _ in reached]
        gradients = [g.to(weight.dtype) for weight, g in reached]
        if kind.gathers > 1 and not adds:
            if reached:
                torch._foreach_add_([weight.gathered for weight in weights if weight.gathered is not None], gradients)
            self._state.reached |= {weight.name for weight in weights}
            weights = [weight for weight in self._state.weights if weight.name in self._state.reached]
            gradients = [weight.gathered for weight in weights if weight.gathered is not None]
        if not kind.updates:
            return outputs, True
        with torch.no_grad():
            device = outputs[0].device
            all_finite = _update(self._state, weights, gradients, lr, scale, kind, together, self._zero, device)
            self._state.forget_gathered()
        return outputs, all_finite

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled, record = compile_recorded(gm, example_inputs, self._options)
        self.records.append(record)
        return compiled


def _update(
    state: TrainingState,
    weights: Sequence[TrainedWeight],
    gradients: list[Tensor],
    lr: float,
    scale: float,
    kind: StepKind,
    together: Together,
    zero: ZeroUpdate | None,
    device: torch.device,
) -> bool:
    """Update weights in place, with torch's fused and foreach kernels.

    Args:
        state: the trained state.
        weights: those that have a gradient.
        gradients: theirs, scaled, summed over `kind.gathers` steps; they are overwritten.
        lr: the learning rate.
        scale: the loss scale.
        kind: the tasks of the step.
        together: those that have to agree on whether gradients are finite, and on their norm.
        zero: divides the update among them.
        device: where they train.

    Returns:
        Whether all gradients were finite, where they are scaled; if not, nothing has changed.
    """
    if kind.gathers > 1 and gradients:
        torch._foreach_div_(gradients, kind.gathers)
    by_name = {weight.name: g for weight, g in zip(weights, gradients, strict=True)}
    groups = state.groups_of(by_name)
    scaled = torch.tensor(scale, dtype=torch.float64)
    norm: Tensor | None = None
    # In a pipeline a norm is made where any stage asks for one.
    clipped = state.groups if together.has_stages else groups
    clips = kind.clips and any(group.rule.max_norm_clip is not None for group in clipped)
    if (gradients or together.has_stages) and (kind.scales or clips):
        own = _norm_of(weights, gradients) if gradients else torch.zeros((), device=device)
        norm = together.norm(own)
    if kind.scales:
        all_finite = norm is None or bool(norm.isfinite())
        if not together.agree(all_finite, device):
            return False

    def apply() -> None:
        own = {weight.name for weight in weights if weight.is_own}
        for group in state.groups_of(own):
            divisor = None
            if norm is not None:
                most = group.rule.max_norm_clip if kind.clips else None
                divisor = gradient_divisor(norm, scaled.to(norm.device), most)
            _update_group(group, [by_name[weight.name] for weight in group.weights], lr, divisor)
        state.round()

    if zero is None:
        apply()
    else:
        zero.step(apply)
    for group in state.groups:
        group.count += 1
    return True


def _norm_of(weights: Sequence[TrainedWeight], gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of all gradients, with the parts of them that other processes have."""
    own = [g for weight, g in zip(weights, gradients, strict=True) if weight.group is None]
    parts = [(weight.group, g) for weight, g in zip(weights, gradients, strict=True) if weight.group is not None]
    if not parts:
        return gradient_norm(gradients)
    group = parts[0][0]
    assert group is not None
    flat = torch.cat([g.reshape(-1) for _, g in parts])
    of_parts = square_sum_over(flat, group).double()
    return (of_parts + gradient_norm(own) ** 2).sqrt() if own else of_parts.sqrt()


def _update_group(group: UpdateGroup, gradients: list[Tensor], lr: float, divisor: Tensor | None) -> None:
    rule, masters = group.rule, [weight.master for weight in group.weights]
    count = int(group.count) + 1
    if isinstance(rule, AdamRule) and fused_adamw is not None and _fits_fused(rule, masters):
        _fused(fused_adamw, rule, group.weights, gradients, lr, count, divisor)
        return
    if divisor is not None:
        torch._foreach_mul_(gradients, (1 / divisor).to(gradients[0].dtype))
    rate = torch.tensor(lr, dtype=torch.float64, device=masters[0].device)
    updates = group.count.to(masters[0].device) + 1
    for weight, gradient in zip(group.weights, gradients, strict=True):  # alone: its temporaries are freed at once
        given = [weight.master], [gradient], [[moment] for moment in weight.moments], updates, rate
        if isinstance(rule, LambRule):
            updated = rule.update(*given, partial(norm_over, group=weight.group))
        else:
            updated = rule.update(*given)
        weight.master.copy_(updated.weights[0])
        for moment, (made,) in zip(weight.moments, updated.moments, strict=True):
            moment.copy_(made)


def _fits_fused(rule: AdamRule, masters: Sequence[Tensor]) -> bool:
    # Without bias correction the kernel is given a count at which there is none, which needs these to be under 1.
    bounded = rule.do_bias_correction or (rule.alpha < 1 and rule.beta < 1)
    return bounded and all(master.is_floating_point() for master in masters)


def _fused(
    kernel: Callable[..., None],
    rule: AdamRule,
    weights: Sequence[TrainedWeight],
    gradients: list[Tensor],
    lr: float,
    count: int,
    divisor: Tensor | None,
) -> None:
    """AdamW's kernel: decay before the update is its own; after the update it is a second walk over the weights."""
    epsilon = rule.epsilon
    if rule.decay_after and rule.do_bias_correction:
        epsilon /= (1 - rule.beta**count) ** 0.5  # (√b/a)·m/(√v+ε) is (m/a) / (√(v/b) + ε/√b)
    masters = [weight.master for weight in weights]
    kernel(
        masters,
        gradients,
        [weight.moments[0] for weight in weights],
        [weight.moments[1] for weight in weights],
        count=float(count) if rule.do_bias_correction else _NO_CORRECTION,
        lr=lr,
        beta1=rule.alpha,
        beta2=rule.beta,
        weight_decay=0.0 if rule.decay_after else rule.lambda_coef,
        eps=epsilon,
        divisor=divisor,
    )
    if rule.decay_after and rule.lambda_coef:
        torch._foreach_mul_(masters, 1 - lr * rule.lambda_coef)


_NO_CORRECTION = 1e30
"""A count of updates at which 1 - alpha**count is 1 for every alpha that float64 tells from 1."""
