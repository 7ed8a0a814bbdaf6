"""Trains a model in several processes, by data, by layers that they share, and by stages.

Data parallelism is torch's DistributedDataParallel around the compiled forward and backward. Tensor parallelism is
torch's, with the plan of the model or one made from its structure. As in Megatron, the first linear layer of a pair is
divided by its outputs and the second by its inputs, so one all-reduce follows each pair (Shoeybi et al.,
"Megatron-LM", 2019, section 3).
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ort_dynamo.errors import SeveralProcessesError
from ort_dynamo.training.trainer.distributed.adasum import adasum_hook
from ort_dynamo.training.trainer.distributed.process_group import ForwardBackward, Found, Together
from ort_dynamo.training.trainer.distributed.stages import Stages
from ort_dynamo.training.trainer.model_with_loss import CombinedModel
from ort_dynamo.training.trainer.running import RunningModel
from ort_dynamo.training.trainer.training_state import TrainedWeight, local_of, square_sum_over

__all__ = ["LayerReplicas", "PipelinedModel", "Replicas", "StageReplicas", "agree_on", "divide_layers", "plan_of"]


class Replicas(Together):
    """Has a model's gradients reduced over all processes, each of which has the whole model.

    Made, it has given all of them rank 0's weights and buffers. Before each forward buffers are rank 0's again.

    Args:
        combined: model and loss.
        postpones: whether gradients are reduced in steps that update alone; otherwise each step's are.
        adasum: whether they are reduced by Adasum; otherwise they are averaged.
    """

    def __init__(self, combined: nn.Module, *, postpones: bool, adasum: bool) -> None:
        self.postpones = postpones
        self._called = _Called(combined)
        # The forward is compiled, so looking for parameters that a loss does not depend on walks over few nodes.
        self._ddp = DistributedDataParallel(self._called, find_unused_parameters=True)
        if adasum:
            self._ddp.register_comm_hook(None, adasum_hook)

    def gradients(self, asked: ForwardBackward) -> Found:
        """Run forward and backward, in which DistributedDataParallel adds to each parameter's `grad` and reduces it."""
        has_sum = _reached_anywhere(asked) if asked.adds else [False] * len(asked.weights)
        for weight, has in zip(asked.weights, has_sum, strict=True):
            before = weight.gathered if has else None
            weight.parameter.grad = None if before is None else before.to(weight.parameter.dtype, copy=True)
        self._called.used = [weight.parameter for weight, has in zip(asked.weights, has_sum, strict=True) if has]
        with torch.enable_grad():
            loss, outputs = self._run(asked)
        torch.autograd.backward(loss, torch.full_like(loss, asked.scale))
        reduced = [weight.parameter.grad for weight in asked.weights]
        for weight in asked.weights:
            weight.parameter.grad = None
        return (loss.detach(), *outputs[1:]), reduced

    def _run(self, asked: ForwardBackward) -> tuple[Tensor, Any]:
        """Run a forward that gives the loss first; gives the loss to call `backward` of, and all that it gave."""
        self._called.call = asked.called
        with nullcontext() if asked.reduces else self._ddp.no_sync(), warnings.catch_warnings():
            # torch warns once that all parameters were used; a later step may not use all.
            warnings.filterwarnings("ignore", message="(?s).*find_unused_parameters=True was specified")
            try:
                loss = self._ddp(*asked.inputs)
                outputs = self._called.outputs
            finally:
                self._called.outputs, self._called.used = None, []
        return loss, outputs

    def agree(self, all_finite: bool, device: torch.device) -> bool:
        """Check whether gradients were finite in all processes."""
        return agree_on(all_finite, device)


def _reached_anywhere(asked: ForwardBackward) -> list[bool]:
    """Check of each weight whether any process has gathered a sum."""
    reached = [weight.name in asked.reached for weight in asked.weights]
    found = torch.tensor(reached, dtype=torch.int32, device=asked.weights[0].parameter.device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return [bool(one) for one in found.tolist()]


def agree_on(holds: bool, device: torch.device) -> bool:
    """Check whether something holds in all processes."""
    found = torch.tensor(int(holds), device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MIN)
    return bool(found)


class _Called(nn.Module):
    """Calls a function that runs a module; only the loss goes through DistributedDataParallel, which copies results."""

    def __init__(self, combined: nn.Module) -> None:
        super().__init__()
        self.combined = combined
        self.call: Callable[..., Any] = combined
        self.outputs: Any = None
        self.used: list[nn.Parameter] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "call":
            object.__setattr__(self, name, value)  # no second place for the model
        else:
            super().__setattr__(name, value)

    def forward(self, *inputs: Any) -> Tensor:
        self.outputs = self.call(*inputs)
        loss: Tensor = self.outputs[0]
        return _Using.apply(loss, *self.used) if self.used else loss  # type: ignore[no-untyped-call]


class _Using(torch.autograd.Function):
    """A loss that depends on parameters without a gradient of them, so that DistributedDataParallel reduces `grad`."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * ctx.parameters


_FIRST_THEN_SECOND = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("q", "k", "v"), "o"),
    (("self.query", "self.key", "self.value"), "output.dense"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("intermediate.dense",), "output.dense"),
    (("up_proj",), "down_proj"),
    (("linear1",), "linear2"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
)
"""Paths below a module: of layers that are divided by outputs, and of the one that follows them."""

_POINTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Mish, nn.Dropout, nn.Identity)
"""Modules that may be between the two layers of a pair in an nn.Sequential: each computes the same of each part."""

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""transformers' name of a style -> torch's style."""


def plan_of(model: nn.Module, parts: int) -> dict[str, ParallelStyle]:
    """Name of a layer -> how it is divided: by the model's own `tp_plan`, otherwise by its structure.

    Raises:
        SeveralProcessesError: neither divides a layer.
    """
    own: Mapping[str, str] = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    plan: dict[str, ParallelStyle] = {}
    if own:
        for pattern, style in own.items():
            if style not in _STYLES:
                raise SeveralProcessesError(reason=f"the model's tp_plan asks for {style!r} of {pattern!r}")
            names = [name for name, _ in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
            plan.update({name: _STYLES[style]() for name in names})
    else:
        for firsts, second in _pairs(model, parts):
            if not {*firsts, second} & plan.keys():
                plan.update({name: ColwiseParallel() for name in firsts})
                plan[second] = RowwiseParallel()
    if not plan:
        reason = (
            f"distributed.horizontal_parallel_size is {parts}, and the model has no tp_plan, and no two linear "
            f"layers in a row, or queries, keys, values and their output, whose sizes {parts} divides. Set it to 1"
        )
        raise SeveralProcessesError(reason=reason)
    return plan


def _pairs(model: nn.Module, parts: int) -> Iterator[tuple[list[str], str]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            continue  # queries, keys and values are one weight, which styles of linear layers do not divide
        below = dict(module.named_modules())
        linear = [key for key, one in below.items() if isinstance(one, nn.Linear)]
        shapes = [*_FIRST_THEN_SECOND]
        if isinstance(module, nn.Sequential):
            in_a_row = [key for key, one in module.named_children() if not isinstance(one, _POINTWISE)]
            shapes += [((first,), second) for first, second in pairwise(in_a_row)]
        for firsts, second in shapes:
            if {*firsts, second} <= set(linear) and _divides(below, firsts, second, parts):
                ahead = f"{name}." if name else ""
                yield [ahead + one for one in firsts], ahead + second


def _divides(below: Mapping[str, Any], firsts: Sequence[str], second: str, parts: int) -> bool:
    outputs = [below[one].out_features for one in firsts]
    return below[second].in_features in outputs and all(size % parts == 0 for size in outputs)


def divide_layers(combined: nn.Module, model: nn.Module, inputs: Sequence[Tensor], parts: int) -> DeviceMesh:
    """Divide the layers of a model, and check that its loss is the same; all processes begin with rank 0's weights.

    Args:
        combined: the model with its loss.
        model: the model.
        inputs: of the first step, the same in all processes that share layers.
        parts: among how many processes: neighbours.

    Returns:
        All processes by "data" and "horizontal".

    Raises:
        SeveralProcessesError: no plan fits.
    """
    plan = plan_of(model, parts)
    device = next(iter(model.parameters())).device
    for tensor in [*combined.parameters(), *combined.buffers()]:
        distributed.broadcast(tensor.detach(), 0)
    frozen = {name for name, one in model.named_parameters() if not one.requires_grad}
    mesh = init_device_mesh(
        device.type, (distributed.get_world_size() // parts, parts), mesh_dim_names=("data", "horizontal")
    )
    expected = _loss_of(combined, inputs)
    parallelize_module(model, mesh["horizontal"], plan)
    for name, one in model.named_parameters():
        one.requires_grad_(name not in frozen)
    error: Exception | None = None
    try:
        is_same = bool(torch.isclose(_loss_of(combined, inputs), expected, rtol=1e-3, atol=1e-5, equal_nan=True))
    except Exception as raised:  # any error of the model's code on a part of a layer's outputs
        is_same, error = False, raised
    if not agree_on(is_same, device):
        reason = (
            f"divided among {parts} processes, {', '.join(plan)} do not compute the model's results"
            f"{'' if error is None else f' ({error})'}. Processes that share layers have to have the same batch, and "
            "the model must not take a number of heads or features for granted; otherwise set horizontal_parallel_size "
            "to 1"
        )
        raise SeveralProcessesError(reason=reason) from error
    return mesh


def _loss_of(combined: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    modes = [module.training for module in combined.modules()]
    combined.eval()
    try:
        loss: Tensor = combined(*inputs)[0]  # with gradients: without them torch has encoders of its own
        return loss.detach()
    finally:
        for module, mode in zip(combined.modules(), modes, strict=True):
            module.training = mode


class LayerReplicas(Together):
    """Reduces gradients over the processes that have the same part: DistributedDataParallel takes no DTensors.

    Args:
        combined: model and loss.
        mesh: all processes by "data" and the parts that they share.
        postpones: whether gradients are reduced in steps that update alone.
    """

    shares_layers = True

    def __init__(self, combined: nn.Module, mesh: DeviceMesh, *, postpones: bool) -> None:
        self.postpones = postpones
        self._combined = combined
        self._group = mesh["data"].get_group()
        self._size = mesh["data"].size()

    def gradients(self, asked: ForwardBackward) -> Found:
        """Run forward and backward after buffers are the first replica's, and average this process's part."""
        if self._size > 1:
            for buffer in self._combined.buffers():
                distributed.broadcast(buffer, group=self._group, group_src=0)
        outputs, found = self._computed(asked)
        both = zip(found, asked.weights, strict=True)
        own = [self._own(g, weight, asked.adds and weight.name in asked.reached) for g, weight in both]
        if asked.reduces:
            self._reduce([g for g in own if g is not None])
        return outputs, own

    def _computed(self, asked: ForwardBackward) -> Found:
        return asked.run()

    @staticmethod
    def _own(gradient: Tensor | None, weight: TrainedWeight, adds: bool) -> Tensor | None:
        """Return this process's part of a gradient, in the updated dtype, plus the sum gathered before."""
        if gradient is None:
            return weight.gathered.clone() if adds and weight.gathered is not None else None
        own = local_of(gradient, weight.parameter).to(weight.dtype)
        return own if weight.gathered is None or not adds else own + weight.gathered

    def _reduce(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients in place, those of one dtype in one collective."""
        if self._size == 1:
            return
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            own = [gradient for gradient in gradients if gradient.dtype is dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in own])
            distributed.all_reduce(flat, group=self._group)
            flat /= self._size
            for gradient, reduced in zip(own, torch.split(flat, [one.numel() for one in own]), strict=True):
                gradient.copy_(reduced.view_as(gradient))

    def agree(self, all_finite: bool, device: torch.device) -> bool:
        """Check whether gradients were finite in all processes."""
        return agree_on(all_finite, device)


class PipelinedModel(RunningModel):
    """A model of which this process runs a stage, and trains that stage's weights.

    Args:
        stages: run the model.
        others: as RunningModel takes them.
    """

    def __init__(self, stages: Stages, *others: Any, **named: Any) -> None:
        self.stages = stages
        super().__init__(*others, **named)
        stages.compiles = self._region

    @property
    def own_names(self) -> set[str]:
        """The entries of the model's state_dict that are this stage's."""
        return self.stages.own

    def evaluate(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the model in evaluation mode; gives the outputs of model_desc in all processes of the pipeline."""
        return self._run_stage(inputs, predicts=False)

    def predict(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the model in evaluation mode without the label; gives the outputs of model_desc but the loss."""
        return self._run_stage(inputs, predicts=True)

    def _run_stage(self, inputs: Sequence[Tensor], *, predicts: bool) -> list[Tensor]:
        self._set_mode(training=False)
        with self._settings(), torch.no_grad():
            outputs = self.stages.evaluate(inputs, predicts=predicts)
        return outputs[: len(self._description.outputs) - predicts]


class StageReplicas(LayerReplicas):
    """Reduces gradients over the processes that have the same stage, whose forward and backward torch's schedule runs.

    Args:
        combined: model and loss.
        mesh: all processes by "data" and "pipeline".
        stages: run the model.
        outputs: how many outputs model_desc has.
        postpones: whether gradients are reduced in steps that update alone.
    """

    has_stages = True

    def __init__(
        self, combined: CombinedModel, mesh: DeviceMesh, stages: Stages, outputs: int, *, postpones: bool
    ) -> None:
        super().__init__(combined, mesh, postpones=postpones)
        self._stages = stages
        self._outputs = outputs

    def _computed(self, asked: ForwardBackward) -> Found:
        parameters = list(self._combined.parameters())
        for parameter in parameters:
            parameter.grad = None
        try:
            loss, outputs = self._stages.train(asked.inputs)
            found = [weight.parameter.grad for weight in asked.weights]
        finally:
            for parameter in parameters:
                parameter.grad = None
        return (loss, outputs[: self._outputs]), found

    def norm(self, own: Tensor) -> Tensor:
        """Return the norm of the gradients of all stages."""
        return square_sum_over(own.double(), self._stages.group).sqrt()
