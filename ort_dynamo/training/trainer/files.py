"""Makes the ONNX files of a trainer: its forward, its forward with gradients, its whole step; checks the forward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass
from torch import Tensor

from ort_dynamo.embedding import OPSET, PassOptions, at_opset, run_model, write_model, write_optimized
from ort_dynamo.errors import OpsetError
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
from ort_dynamo.training.torch_internals import has_recurrent_layers, with_own_code
from ort_dynamo.training.trainer.captured_step import capture
from ort_dynamo.training.trainer.file_names import check_names
from ort_dynamo.training.trainer.model_with_loss import PREFIX, CombinedModel
from ort_dynamo.training.trainer.running import RunningModel
from ort_dynamo.training.trainer.step_files import step_model
from ort_dynamo.training.trainer.traceable_model import mask_questions_answered, unchanged
from ort_dynamo.training.trainer.training_state import TrainingState
from ort_dynamo.training.trainer.whole_step import StepKind

__all__ = ["StepFiles", "check_export"]

_log = logging.getLogger("orttraining")


class StepFiles:
    """Makes the models of a trainer's steps, as they are now.

    Args:
        combined: model and loss.
        state: the trained state.
        description: names of inputs, outputs and sizes.
        kind: the tasks of a step that updates the weights.
        passes: by which passes run.
        contrib_ops: whether models may have operators that are ONNX Runtime's own.
        optimizer: the optimizer's name, by which the nodes of the update are called.
        opset: version of ONNX's operators in the forward, as far as it can be written in it.
        infer_shapes: whether every value in a file has its shape; otherwise inputs and outputs alone.
        function: the public function that the description was given to, for errors.
    """

    def __init__(
        self,
        combined: CombinedModel,
        state: TrainingState,
        description: _ORTTrainerModelDesc,
        kind: StepKind,
        passes: PassOptions,
        *,
        contrib_ops: bool = False,
        optimizer: str = "Optimizer",
        opset: int = OPSET,
        infer_shapes: bool = True,
        function: str = "ORTTrainer",
    ) -> None:
        self._combined = combined
        self._state = state
        self._description = description
        self._kind = kind
        self._passes = passes
        self._contrib_ops = contrib_ops
        self._optimizer = optimizer
        self._opset = opset
        self._infer_shapes = infer_shapes
        self._function = function

    def forward(self, inputs: Sequence[Tensor], *, training: bool = False) -> ir.Model:
        """Return the forward and the loss, with the weights as constants.

        Args:
            inputs: the inputs of the model.
            training: use training mode: dropout is active, and running statistics are outputs.
        """
        model = self._model(inputs, None, training=training, may_be_fed=False, lr=0.0)
        try:
            model = at_opset(model, self._opset)
        except OpsetError as error:
            _log.warning("The model has opset %d: %s", OPSET, error)
        return self._with_shapes(model)

    def with_gradients(self, inputs: Sequence[Tensor]) -> ir.Model:
        """Return the forward in training mode and the gradients, with the weights as constants."""
        model = self._model(inputs, StepKind(updates=False), training=True, may_be_fed=False, lr=0.0)
        return self._with_shapes(model)

    def step(self, inputs: Sequence[Tensor], lr: float) -> ir.Model:
        """Return the whole step, with weights, optimizer state and learning rate as inputs that have values."""
        return self._with_shapes(self._model(inputs, self._kind, training=True, may_be_fed=True, lr=lr))

    def write_for_debugging(self, options: ORTTrainerOptions, inputs: Sequence[Tensor], lr: float) -> None:
        """Write the files that debug.graph_save_paths asks for; raises OSError."""
        paths = options.debug.graph_save_paths
        self._write(
            paths.model_after_graph_transforms_path,
            lambda: self._with_shapes(self._model(inputs, None, training=True, may_be_fed=False, lr=0.0)),
        )
        self._write(paths.model_with_gradient_graph_path, lambda: self.with_gradients(inputs))
        self._write(paths.model_with_training_graph_path, lambda: self.step(inputs, lr))
        if optimized := paths.model_with_training_graph_after_optimization_path:
            write_optimized(self.step(inputs, lr), Path(optimized))

    @staticmethod
    def _write(path: str, model: Callable[[], ir.Model]) -> None:
        if path:
            write_model(model(), Path(path))

    def _model(
        self, inputs: Sequence[Tensor], kind: StepKind | None, *, training: bool, may_be_fed: bool, lr: float
    ) -> ir.Model:
        combined = self._combined
        check_names(self._function, self._description, combined.model, self._state, kind)

        def call(*inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return combined(*inputs)

        with unchanged(combined), mask_questions_answered(combined):
            if not training:
                combined.eval()
            captured = capture(
                with_own_code(call),
                PREFIX,
                inputs,
                self._description,
                self._state,
                kind,
                lr,
                recurrent=has_recurrent_layers(combined),
            )
        return step_model(
            captured,
            self._description,
            self._passes,
            contrib_ops=self._contrib_ops,
            may_be_fed=may_be_fed,
            parameters=dict(combined.model.named_parameters(remove_duplicate=False)),
            optimizer=self._optimizer,
        )

    def _with_shapes(self, model: ir.Model) -> ir.Model:
        """Give every inner value of a model its type and shape, or none."""
        if self._infer_shapes:  # those that come from FX nodes have theirs
            ShapeInferencePass(check_type=False, strict_mode=False)(model)
            return model
        kept = {*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()}
        for node in model.graph.all_nodes():
            for value in node.outputs:
                if value not in kept:
                    value.shape = value.type = None
        return model


_MESSAGE = (
    "Mismatch between outputs of PyTorch model and exported ONNX model, at {name}. "
    "Note that different backends may exhibit small computational differences. "
    "If this is within acceptable margin, or if there is random generator in the model causing inevitable mismatch, "
    "you can proceed training by setting the flag debug.check_model_export to False."
)


def check_export(
    running: RunningModel, files: StepFiles, description: _ORTTrainerModelDesc, inputs: Sequence[Tensor]
) -> None:
    """Compare a model's own outputs, without dropout, with those of its ONNX file.

    Raises:
        AssertionError: they differ by more than 1e-6 + 1e-2 of the file's.
    """
    expected = running.evaluate_in_torch(inputs)
    model = ir.to_proto(files.forward(inputs)).SerializeToString()
    given = {one.name: tensor.cpu().numpy() for one, tensor in zip(description.inputs, inputs, strict=True)}
    for own, found, described in zip(expected, run_model(model, given), description.outputs, strict=True):
        is_float = own.is_floating_point()
        np.testing.assert_allclose(
            (own.float() if is_float else own).cpu().numpy(),
            found.astype(np.float32) if is_float else found,
            rtol=1e-2,
            atol=1e-6,
            err_msg=_MESSAGE.format(name=described.name),
        )
