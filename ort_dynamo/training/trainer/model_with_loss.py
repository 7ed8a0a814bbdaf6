"""Makes of a model and its loss, or of an ONNX model, one function of the inputs that model_desc names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from ort_dynamo.errors import TrainingGraphError
from ort_dynamo.onnx_module import OnnxModule, to_model_proto
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.requirements import require
from ort_dynamo.training.torch_internals import tree_map

__all__ = ["PREFIX", "CombinedModel", "OnnxCombined", "flat_outputs", "postprocessed"]

PREFIX = "model."
"""Name prefix of a model's parameters in CombinedModel."""

_LOSS_FN = ". If the last input is the label, give loss_fn: a function of the model's output and the label"


class CombinedModel(nn.Module):
    """Computes the loss of a model and its outputs.

    Args:
        model: the model.
        loss_fn: takes the model's output and the last input, and gives the loss; None: the model gives it.
        inputs: the inputs' names, the label's the last where there is a loss_fn.
        outputs: how many outputs there are, the loss among them.
        loss: which of them is the loss.
        narrow: the dtype that matmuls compute in (torch.autocast); None leaves each operator its own.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        inputs: Sequence[str],
        outputs: int,
        loss: int,
        narrow: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self._outputs = outputs
        self._loss = loss
        self._narrow = narrow
        of_model = list(inputs if loss_fn is None else inputs[:-1])
        self._keywords = of_model if _takes(model, of_model) else None

    def check_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Check that the model's forward can take the inputs that it gets.

        Raises:
            TrainingGraphError: it cannot.
        """
        if reason := self.misfit(inputs):
            raise TrainingGraphError(reason=reason)

    def misfit(self, inputs: Sequence[Tensor]) -> str:
        """Say why the model's forward cannot take the inputs, and what to do; "" if it can."""
        given = inputs if self.loss_fn is None else inputs[:-1]
        named = {} if self._keywords is None else dict(zip(self._keywords, given, strict=True))
        try:
            inspect.signature(self.model.forward).bind(*(() if named else given), **named)
        except TypeError as error:
            count, kind = f"{len(given)} input{'s' * (len(given) != 1)}", type(self.model).__name__
            advice = "" if self.loss_fn else _LOSS_FN
            return f"{kind}.forward() cannot take {count}: {error}{advice}"
        return ""

    def forward(self, *inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the loss, and the outputs in the order of model_desc: the loss among them, the others detached.

        Raises:
            TrainingGraphError: the model gives too few outputs, or the loss is not a real scalar tensor.
        """
        given = inputs if self.loss_fn is None else inputs[:-1]
        with self._computing(given):
            found = self.called(given)
        of_model = self._outputs - (self.loss_fn is not None)
        outputs = list(islice(flat_outputs(found), of_model))  # later results may be anything
        if len(outputs) < of_model:
            message = f"the model returns {len(outputs)} tensors, and model_desc has {of_model} outputs of it"
            raise TrainingGraphError(reason=message)
        if self.loss_fn is None:
            loss = outputs[self._loss]
        else:
            loss = self.compute_loss(_widened(found) if self._narrow is not None else found, inputs[-1])
            outputs.insert(self._loss, loss)
        _check_loss(loss)
        if self._narrow is not None and loss.dtype is not torch.float64:
            loss = loss.float()
        results = [self._given(one) for one in outputs]
        results[self._loss] = loss.detach()
        return loss, tuple(results)

    def compute_loss(self, found: Any, label: Any) -> Tensor:
        """Call the loss function, in a frame that stacks of its errors have."""
        assert self.loss_fn is not None
        return self.loss_fn(found, label)

    def predict(self, *inputs: Any) -> list[Tensor]:
        """Compute the outputs of model_desc but the loss, which a loss_fn would compute, without the label."""
        with self._computing(inputs):
            found = self.called(inputs)
        return [self._given(one) for one in islice(flat_outputs(found), self._outputs - 1)]

    def called(self, inputs: Sequence[Any]) -> Any:
        """Call the model with its own inputs."""
        if self._keywords is None:
            return self.model(*inputs)
        return self.model(**dict(zip(self._keywords, inputs, strict=True)))

    def _computing(self, inputs: Sequence[Any]) -> Any:
        if self._narrow is None:
            return nullcontext()
        device = next((one.device.type for one in inputs if isinstance(one, Tensor)), "cpu")
        return torch.autocast(device, dtype=self._narrow)

    def _given(self, output: Tensor) -> Tensor:
        output = output.detach()
        return output.to(self._narrow) if self._narrow is not None and output.dtype is torch.float32 else output


def _check_loss(loss: Any) -> None:
    """Raise TrainingGraphError for a loss that has no gradient like that of torch's `loss.backward()`."""
    if not isinstance(loss, Tensor):
        raise TrainingGraphError(reason=f"loss_fn returns {type(loss).__name__}; expected a tensor")
    if loss.dim() and loss.numel() != 1:
        reason = f"the loss has the shape {list(loss.shape)}, and must be a scalar. Give its mean or its sum"
        raise TrainingGraphError(reason=reason)
    if loss.is_complex():
        reason = f"the loss is {loss.dtype}, and must be real. Give its real part or its absolute value"
        raise TrainingGraphError(reason=reason)


def _takes(model: nn.Module, names: Sequence[str]) -> bool:
    """Check whether a module's forward has parameters of all these names."""
    parameters = inspect.signature(model.forward).parameters.values()
    by_name = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    return by_name.issuperset(names)


def flat_outputs(found: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's result: of sequences and mappings, in order; None is left out.

    Raises:
        TrainingGraphError: it holds something else.
    """
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        yield from flat_outputs(list(found.values()))
    elif isinstance(found, (tuple, list)):
        for one in found:
            yield from flat_outputs(one)
    elif found is not None:
        raise TrainingGraphError(reason=f"the model returns {type(found).__name__}; expected a tensor")


def _widened(found: Any) -> Any:
    """Widen the narrow tensors that a model returns to float32: losses are computed in that."""
    return tree_map(_wide, found)


def _wide(one: Any) -> Any:
    return one.float() if isinstance(one, Tensor) and one.dtype in (torch.float16, torch.bfloat16) else one


_UPDATED = ".updated"


class OnnxCombined(CombinedModel):
    """Computes the loss and the outputs of an ONNX model, which model_desc names.

    Args:
        model: the model.
        description: names of its inputs and outputs; others of its outputs are left out.
        narrow: as for CombinedModel.
        evaluated: the module that runs in evaluation mode, with tensors of the same names; None: the model itself,
            which then leaves out dropout. With one, outputs of the model that are called "<buffer>.updated" are the new
            values of buffers.

    Raises:
        AssertionError: the model lacks an input or output that model_desc has.
    """

    def __init__(
        self,
        model: OnnxModule,
        description: _ORTTrainerModelDesc,
        narrow: torch.dtype | None,
        evaluated: OnnxModule | None = None,
    ) -> None:
        inputs = [one.name for one in description.inputs]
        outputs = [one.name for one in description.outputs]
        loss = description.loss_index
        assert loss is not None
        super().__init__(model, None, inputs, len(outputs), loss, narrow)
        self._takes: dict[bool, list[int]] = {}
        self._gives: dict[bool, list[int]] = {}
        self._evaluated = () if evaluated is None else (evaluated.eval(),)  # no child: its tensors are the model's
        for training, module in ((True, model), (False, evaluated or model)):
            for name in inputs:
                require(name in module.input_names, f"ONNX model with unknown input type ({name})")
            for name in outputs:
                require(name in module.output_names, f"ONNX model with unknown output type ({name})")
            missing = [name for name in module.input_names if name not in inputs]
            require(not missing, f"model_desc lacks the inputs {missing} of the ONNX model")
            self._takes[training] = [inputs.index(name) for name in module.input_names]
            self._gives[training] = [module.output_names.index(name) for name in outputs]
        self._updates: list[tuple[str, int]] = []
        if evaluated is not None:
            _share(model, evaluated)
            buffers = dict(model.named_buffers())
            keys = {name: key for key, name in model.onnx_names.items()}
            self._updates = [
                (keys[name.removesuffix(_UPDATED)], index)
                for index, name in enumerate(model.output_names)
                if name.endswith(_UPDATED) and keys.get(name.removesuffix(_UPDATED)) in buffers
            ]

    def model_proto(self) -> onnx.ModelProto:
        """Return the file for inference, with the tensors as they are now."""
        return to_model_proto(self._evaluated[0] if self._evaluated else self.model)  # type: ignore[arg-type]

    def called(self, inputs: Sequence[Any]) -> Any:
        """Call the model with its own inputs."""
        training = self.training
        module = self.model if training or not self._evaluated else self._evaluated[0]
        found = module(*(inputs[index] for index in self._takes[training]))
        if training:
            for key, index in self._updates:
                self.model.get_buffer(key).copy_(found[index].detach())
        return [found[index] for index in self._gives[training]]


def _share(model: OnnxModule, evaluated: OnnxModule) -> None:
    """Make two modules share the tensors that have the same names."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = {model.onnx_names[key]: tensor for key, tensor in own.items() if key in model.onnx_names}
    for key, name in evaluated.onnx_names.items():
        if name in own:
            path, _, leaf = key.rpartition(".")
            holder = evaluated.get_submodule(path)
            kept: dict[str, Any] = holder._parameters if leaf in holder._parameters else holder._buffers
            if isinstance(own[name], nn.Parameter) == (kept is holder._parameters):
                kept[leaf] = own[name]


def postprocessed(model: onnx.ModelProto, postprocess: Callable[[onnx.ModelProto], Any] | None) -> onnx.ModelProto:
    """Apply `extra_postprocess` to a model; raises AssertionError if the result is no model."""
    if postprocess is None:
        return model
    found = postprocess(model)
    require(isinstance(found, onnx.ModelProto), "'extra_postprocess' must return a ONNX model")
    return found
