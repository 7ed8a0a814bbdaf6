"""An ONNX model and its loss as one function of the inputs that model_desc names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch
from torch import nn

from ort_dynamo.onnx_module import OnnxModule, to_model_proto
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.requirements import require
from ort_dynamo.training.trainer.combined import CombinedModel

__all__ = ["OnnxCombined", "postprocessed"]

_UPDATED = ".updated"


class OnnxCombined(CombinedModel):
    """Computes the loss and the outputs of an ONNX model, which model_desc names.

    Args:
        model: the model.
        description: names of its inputs and outputs; others of its outputs are left out.
        narrow: as for CombinedModel.
        evaluated: what runs in evaluation mode, with tensors of the same names; None: the model itself, which then
            leaves out dropout. With one, outputs of the model that are called "<buffer>.updated" are what buffers
            become.

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
        """The file for inference, with the tensors as they are now."""
        return to_model_proto(self._evaluated[0] if self._evaluated else self.model)  # type: ignore[arg-type]

    def called(self, inputs: Sequence[Any]) -> Any:
        """What the model returns of its own inputs."""
        training = self.training
        module = self.model if training or not self._evaluated else self._evaluated[0]
        found = module(*(inputs[index] for index in self._takes[training]))
        if training:
            for key, index in self._updates:
                self.model.get_buffer(key).copy_(found[index].detach())
        return [found[index] for index in self._gives[training]]


def _share(model: OnnxModule, evaluated: OnnxModule) -> None:
    """Have two modules hold the same tensors where they have them by the same names."""
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
    """What `extra_postprocess` makes of a model; raises AssertionError where that is no model."""
    if postprocess is None:
        return model
    found = postprocess(model)
    require(isinstance(found, onnx.ModelProto), "'extra_postprocess' must return a ONNX model")
    return found
