"""The first ORTTrainer, that of onnxruntime.capi.ort_trainer: a thin layer over today's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from ort_dynamo.training import orttrainer
from ort_dynamo.training.checkpointing.experimental import load_from_folder, save_into_folder
from ort_dynamo.training.checkpointing.flat_states import flatten, unflatten
from ort_dynamo.training.environment import local_rank_of_environment
from ort_dynamo.training.legacy_descriptions import IODescription, ModelDescription
from ort_dynamo.training.legacy_loss_scaler import LossScaler
from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
from ort_dynamo.training.requirements import require
from ort_dynamo.training.train_step_info import TrainStepInfo
from ort_dynamo.training.trainer.legacy_settings import (
    Attributes,
    Scaler,
    StepRate,
    StepScale,
    attributes_of,
    optimizer_config,
)

__all__ = ["IODescription", "LossScaler", "ModelDescription", "ORTTrainer", "load_checkpoint", "save_checkpoint"]

_SCALE = "loss_scale"
_DEFAULT_SCALE = "default_loss_scale_input_name"
"""The name of the loss scale before the first step; always understood."""


class ORTTrainer:
    """Trains a model as the first ORTTrainer did; new programs should use `ort_dynamo.ORTTrainer`.

    A torch model is copied at the first step; the original does not change after that.

    Args:
        model: a torch.nn.Module, or an ONNX ModelProto whose first output is the loss.
        loss_fn: a function of the model's output and the label that returns a scalar; None if the model returns the
            loss.
        model_desc: the inputs, with the label last if there is a loss_fn, and the outputs, with the loss first.
        training_optimizer_name: "SGDOptimizer", "AdamOptimizer" or "LambOptimizer".
        map_optimizer_attributes: gives the attributes of the optimizer for a weight, by its name: a dict of floats and
            ints under "alpha", "beta", "lambda", "epsilon", "max_norm_clip", "do_bias_correction",
            "weight_decay_mode" (Adam's), "ratio_min" and "ratio_max" (Lamb's). Missing attributes are as in AdamConfig
            and LambConfig, except that Lamb corrects the bias, too. SGD has none and ignores them.
        learning_rate_description: the name of the learning rate among the inputs of a step.
        device: "cpu", "cuda" or "cuda:N", or a torch.device.
        gradient_accumulation_steps: the number of steps per update of the weights.
        world_rank: the rank of this process.
        world_size: the number of processes.
        use_mixed_precision: compute in float16, with float32 weights.
        allreduce_post_accumulation: reduce gradients over processes after their accumulation.
        global_step: the number of earlier updates.
        get_lr_this_step: number of updates so far -> learning rate. With None, pass it to each step.
        loss_scaler: a LossScaler, or an object with its `loss_scale_` and `update_loss_scale`; read with mixed
            precision only. With None, pass the scale to each step.
        deepspeed_zero_stage: 1 shards the optimizer's state among processes.
        enable_grad_norm_clip: clip the norm of gradients for Adam and Lamb.
        frozen_weights: names of weights that are not trained.
        _opset_version: the ONNX opset of files.
        _enable_internal_postprocess: fuse operators of the model.
        _extra_postprocess: called with the ONNX model.
        _use_deterministic_compute: use deterministic kernels.
        use_memory_efficient_gradient: compute gradients from inputs rather than from outputs.
        run_symbolic_shape_infer: infer symbolic shapes.
        enable_adasum: reduce gradients by Adasum.
        optimized_model_filepath: a file for the optimized training graph; "" for none.

    Attributes:
        loss_scale_input_name: the keyword for the loss scale of a step.
        loss_scaler_: the given loss scaler.
        is_train: whether a call of the trainer is a training step.

    Raises:
        AssertionError: an argument is missing, has a wrong type or is out of range.
        RuntimeError: loss_fn does not have two parameters.
        ValueError: "Invalid options: ...", "Invalid model_desc: ...", or an attribute is neither float nor int.
    """

    def __init__(
        self,
        model: nn.Module | onnx.ModelProto,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        model_desc: ModelDescription,
        training_optimizer_name: str,
        map_optimizer_attributes: Callable[[str], Attributes] | None,
        learning_rate_description: IODescription,
        device: str | torch.device,
        gradient_accumulation_steps: int = 1,
        world_rank: int = 0,
        world_size: int = 1,
        use_mixed_precision: bool = False,
        allreduce_post_accumulation: bool = False,
        global_step: int = 0,
        get_lr_this_step: Callable[[int], float] | None = None,
        loss_scaler: Scaler | None = None,
        deepspeed_zero_stage: int = 0,
        enable_grad_norm_clip: bool = True,
        frozen_weights: Sequence[str] = [],  # the old default; nothing changes it
        _opset_version: int = 14,
        _enable_internal_postprocess: bool = True,
        _extra_postprocess: Callable[[onnx.ModelProto], Any] | None = None,
        _use_deterministic_compute: bool = False,
        use_memory_efficient_gradient: bool = False,
        run_symbolic_shape_infer: bool = False,
        enable_adasum: bool = False,
        optimized_model_filepath: str = "",
    ) -> None:
        require(isinstance(model_desc, ModelDescription), "'model_desc' must be a ModelDescription")
        is_model = isinstance(model, (nn.Module, onnx.ModelProto))
        require(is_model, "'model' is required and must be either a 'torch.nn.Module' or ONNX model")
        is_described = isinstance(learning_rate_description, IODescription)
        require(is_described, "'learning_rate_description' must be an IODescription")
        if loss_fn is not None and isinstance(model, onnx.ModelProto):
            message = "loss_fn is not used when creating ORTTrainer because an ONNX model is provided."
            warnings.warn(message, stacklevel=2)
            loss_fn = None
        if loss_fn is not None and (not callable(loss_fn) or len(signature(loss_fn).parameters) != 2):
            raise RuntimeError("loss function should take two arguments - predict and label.")
        require(isinstance(global_step, int) and global_step >= 0, "'global_step' must be a positive int")
        self.is_train: bool = True
        self.loss_scaler_ = loss_scaler
        self._rate = StepRate(get_lr_this_step)
        self._scale = StepScale(loss_scaler) if use_mixed_precision else None
        names = [one.name_ for one in model_desc.inputs_]
        self._is_given_rate = get_lr_this_step is None
        self._is_given_scale = use_mixed_precision and loss_scaler is None
        self.loss_scale_input_name = _DEFAULT_SCALE if _SCALE in names else _SCALE
        rate, scale = learning_rate_description.name_, self.loss_scale_input_name
        self._names = names + [rate] * self._is_given_rate + [scale] * self._is_given_scale
        options = {
            "batch": {"gradient_accumulation_steps": gradient_accumulation_steps},
            "device": {"id": str(device)},
            "distributed": {
                "world_rank": world_rank,
                "world_size": world_size,
                "local_rank": local_rank_of_environment(0) if world_size > 1 else 0,  # it had no argument for it
                "allreduce_post_accumulation": allreduce_post_accumulation,
                "deepspeed_zero_optimization": {"stage": deepspeed_zero_stage},
                "enable_adasum": enable_adasum,
            },
            "lr_scheduler": self._rate,
            "mixed_precision": {"enabled": use_mixed_precision, "loss_scaler": self._scale},
            "utils": {
                "frozen_weights": list(frozen_weights),
                "grad_norm_clip": enable_grad_norm_clip,
                "memory_efficient_gradient": use_memory_efficient_gradient,
                "run_symbolic_shape_infer": run_symbolic_shape_infer,
            },
            "debug": {
                "deterministic_compute": _use_deterministic_compute,
                "graph_save_paths": {"model_with_training_graph_after_optimization_path": optimized_model_filepath},
            },
            "_internal_use": {
                "enable_internal_postprocess": _enable_internal_postprocess,
                "extra_postprocess": _extra_postprocess,
                "onnx_opset_version": _opset_version,
            },
        }
        attributes = attributes_of(model, frozen_weights, map_optimizer_attributes)
        config = optimizer_config(training_optimizer_name, attributes)
        self._trainer = orttrainer.ORTTrainer(
            model, model_desc.as_model_desc(), config, loss_fn, ORTTrainerOptions(options)
        )
        self._trainer._train_step_info.optimization_step = global_step

    # -- steps ---------------------------------------------------------------------------------------------------------

    def train_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Compute the loss and its gradients, and update the weights or gather the gradients for a later update.

        Args:
            args: the model's inputs and the label; then the learning rate, if there is no get_lr_this_step; then, with
                mixed precision, the loss scale, if there is no loss scaler. Or one list of them. The last two are
                numbers, or tensors of one.
            fetches: names of the outputs that are returned.
            kwargs: the same by name, after the positional ones: the learning rate as learning_rate_description says,
                the loss scale as `loss_scale_input_name`.

        Returns:
            The outputs that fetches names; otherwise the outputs in the order of model_desc, and, where the program
            scales the loss itself and this step completes an accumulation, whether all gradients were finite: bool, of
            shape [1]. A tensor where there is one.

        Raises:
            AssertionError: there are more or fewer inputs.
            RuntimeError: `fetches` has an unknown name.
            OrtDynamoError: the step cannot be compiled or run.
        """
        given = self._in_order(args, kwargs)
        require(len(given) == len(self._names), f"the step has the inputs {self._names}, and {len(given)} are given")
        if self._is_given_scale and self._scale is not None:
            self._scale.loss_scale = _number(given.pop(), self.loss_scale_input_name)
        elif self._scale is not None and self.loss_scaler_ is not None:
            self._scale.loss_scale = float(self.loss_scaler_.loss_scale_)
        if self._is_given_rate:
            self._rate.given = _number(given.pop(), "the learning rate")
        info = self._fetching(fetches)
        outputs = self._trainer.train_step(given)
        updated = info.step % self._trainer.options.batch.gradient_accumulation_steps == 0
        if fetches or not updated or not self._is_given_scale:
            return outputs
        all_finite = torch.tensor([info.all_finite], device=self._trainer._device)
        return [*outputs, all_finite] if isinstance(outputs, list) else [outputs, all_finite]

    def eval_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Run the model in evaluation mode, without gradients: dropout is off, and no buffer changes.

        Args:
            args: the model's inputs and the label, which may be left out where fetches leaves out the loss of a
                loss_fn. Or one list of them.
            fetches: names of the outputs that are returned.
            kwargs: the same by name, after the positional ones.

        Returns:
            The outputs that fetches names; otherwise the outputs in the order of model_desc. A tensor where there is
            one.

        Raises:
            AssertionError, RuntimeError, OrtDynamoError: as for `train_step`.
        """
        self._fetching(fetches)
        return self._trainer.eval_step(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call train_step or eval_step, as `train` and `eval` have said."""
        return self.train_step(*args, **kwargs) if self.is_train else self.eval_step(*args, **kwargs)

    def train(self) -> None:
        """Make calls of the trainer training steps."""
        self.is_train = True

    def eval(self) -> None:
        """Make calls of the trainer evaluation steps."""
        self.is_train = False

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        given = list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else list(args)
        if self._is_given_scale and _DEFAULT_SCALE in kwargs:
            kwargs[self.loss_scale_input_name] = kwargs.pop(_DEFAULT_SCALE)
        unknown = sorted(kwargs.keys() - set(self._names))
        require(not unknown, f"the step has no inputs {unknown}")
        return given + [kwargs[name] for name in self._names if name in kwargs]

    def _fetching(self, fetches: Sequence[str] | None) -> TrainStepInfo:
        is_list = fetches is None or (isinstance(fetches, (list, tuple)) and all(isinstance(n, str) for n in fetches))
        require(is_list, "'fetches' must be a list of names")
        info = self._trainer._train_step_info
        info.fetches = list(fetches or ())
        return info

    # -- attributes that programs read
    # -----------------------------------------------------------------------------------

    @property
    def global_step_(self) -> int:
        """Number of updates of the weights, those before the trainer included."""
        return self._trainer._train_step_info.optimization_step

    @property
    def current_step(self) -> int:
        """Number of training steps so far."""
        return self._trainer._train_step_info.step

    @property
    def session(self) -> Any:
        """An object whose `get_state()` gives weights and optimizer state as arrays; None before the first step."""
        return self._trainer._training_session

    @property
    def onnx_model_(self) -> onnx.ModelProto | None:
        """The model with the current weights; None before the first step of a torch model."""
        return self._trainer._onnx_model

    # -- states --------------------------------------------------------------------------------------------------------

    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the model with the current weights to an ONNX file, as `ort_dynamo.ORTTrainer` does."""
        self._trainer.save_as_onnx(path)

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, Tensor]:
        """Give weights, buffers and optimizer state, flat.

        Args:
            include_optimizer_state: False for weights and buffers alone, as `torch.nn.Module.state_dict` has them.

        Returns:
            {name: tensor} of copies on the CPU; {} before the first step. The optimizer's tensors of a weight are
            "Moment_1_", "Moment_2_" or "Update_Count_" and its name; Lamb's count is "Step".
        """
        return flatten(self._trainer.state_dict(), include_optimizer_state)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = False) -> None:
        """Load a dictionary of `state_dict`, or a torch model's; before the first step, at that step.

        Args:
            state_dict: {name: tensor}.
            strict: raise where names are missing or unknown; an optimizer's state that is missing whole is warned of.

        Raises:
            RuntimeError: names are missing or unknown, or a tensor has another shape.
        """
        self._trainer.load_state_dict(unflatten(state_dict, {}), strict=strict)


def save_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Save a trainer's state and the user's dictionary as "PREFIX.ort.pt" in a folder, by torch.save.

    Args:
        model: the trainer.
        checkpoint_dir: the folder, which has to exist.
        checkpoint_prefix: the beginning of the file's name.
        checkpoint_state_dict: the value that `load_checkpoint` shall return: tensors and plain values.
        include_optimizer_state: False for the weights alone.

    Raises:
        AssertionError: there is no such folder.
        OSError: the file cannot be written.
        TypeError: `checkpoint_state_dict` has a value that torch.load does not load without running code.
    """
    save_into_folder(model._trainer, checkpoint_dir, checkpoint_prefix, checkpoint_state_dict, include_optimizer_state)


def load_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint of `save_checkpoint`.

    Args:
        model: the trainer.
        checkpoint_dir: the folder.
        checkpoint_prefix: the beginning of the files' names.
        strict: as for `ORTTrainer.load_state_dict`.

    Returns:
        The dictionary saved as `checkpoint_state_dict`.

    Raises:
        AssertionError: a file is missing, or states of several processes that should be equal are not.
        CheckpointFileError: a file is damaged, or holds a value that cannot be loaded without running code.
    """
    return load_from_folder(model._trainer, checkpoint_dir, checkpoint_prefix, strict)


def _number(value: Any, name: str) -> float:
    is_one = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    require(is_one, f"{name} must be a number, or a tensor of one")
    return float(value)
