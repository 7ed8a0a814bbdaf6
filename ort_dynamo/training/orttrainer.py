"""ORTTrainer: trains a model from its description, with forward, loss, gradients and update in ONNX Runtime."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn

from ort_dynamo.embedding import write_model
from ort_dynamo.errors import SeveralProcessesError
from ort_dynamo.training.checkpoint import load_state, save_state
from ort_dynamo.training.model_desc_validation import _ORTTrainerModelDesc
from ort_dynamo.training.optim.config import _OptimizerConfig
from ort_dynamo.training.orttrainer_options import ORTTrainerOptions
from ort_dynamo.training.requirements import require
from ort_dynamo.training.train_step_info import TrainStepInfo
from ort_dynamo.training.trainer.building import Parts, step_files
from ort_dynamo.training.trainer.files import StepFiles, check_export
from ort_dynamo.training.trainer.guarded_step import GuardedSteps
from ort_dynamo.training.trainer.model_with_loss import OnnxCombined
from ort_dynamo.training.trainer.running import RunningModel
from ort_dynamo.training.trainer.settings import check_device, training_device
from ort_dynamo.training.trainer.state_dicts import TrainedWeights, copied_state, torch_state
from ort_dynamo.training.trainer.trainer_state import load_trainer_state, trainer_state

__all__ = ["ORTTrainer", "ORTTrainerOptions", "TrainStepInfo"]


class _NotYetWarning(RuntimeWarning, UserWarning):
    """The document speaks of a RuntimeWarning, the code gave a UserWarning: this is both."""


def _takes_two(loss_fn: Any) -> bool:
    """Check that a loss function can be called with two arguments, the model's output and the label."""
    if not callable(loss_fn):
        return False
    try:
        signature(loss_fn).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin that has no signature; the first step calls it
        return True
    return True


class ORTTrainer:
    """Trains a model: one call of `train_step` computes the loss and its gradients and updates the weights.

    A torch model is copied at the first step; the original does not change after that. `state_dict` has the trained
    weights.

    Args:
        model: a torch.nn.Module, or an ONNX ModelProto whose loss is one of its outputs.
        model_desc: {"inputs": [(name, shape)], "outputs": [(name, shape, is_loss)]}. A shape is a list of ints and of
            strings; a string names a size that may change from step to step. Inputs have the names of the parameters
            of the model's forward; with a loss_fn, the label follows. Outputs are in the model's order; with a loss_fn,
            the loss is first. Exactly one output is the loss.
        optim_config: optim.SGDConfig, AdamConfig or LambConfig.
        loss_fn: a function of the model's output and the label that returns a scalar; None if the model returns the
            loss.
        options: all other settings. None uses the defaults, with CUDA if it is available.

    Raises:
        AssertionError: an argument is missing or has a wrong type.
        ValueError: "Invalid model_desc: ...", or `model` is neither module nor ONNX model.
        RuntimeError: device.id is "cuda", but CUDA is not available.
        OnnxModelError: the ONNX model is malformed, or has an operator that cannot be trained.
    """

    def __init__(
        self,
        model: nn.Module | onnx.ModelProto,
        model_desc: dict[str, Any],
        optim_config: _OptimizerConfig,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        options: ORTTrainerOptions | None = None,
    ) -> None:
        require(model is not None, "'model' is required and must be either a 'torch.nn.Module' or ONNX model")
        require(isinstance(model_desc, dict), "'model_desc' must be a 'dict'")
        require(
            isinstance(optim_config, _OptimizerConfig),
            "'optim_config' is required and must be any of 'AdamConfig', 'LambConfig' or 'SGDConfig'",
        )
        require(
            loss_fn is None or _takes_two(loss_fn), "'loss_fn' must be either 'None' or a callable with two parameters"
        )
        is_options = options is None or isinstance(options, ORTTrainerOptions)
        require(is_options, "'options' must be either 'None' or 'ORTTrainerOptions'")
        self._torch_model: nn.Module | None = None
        self._given_onnx: onnx.ModelProto | None = None
        if isinstance(model, nn.Module):
            self._torch_model = model
        elif isinstance(model, onnx.ModelProto):
            require(loss_fn is None, "'loss_fn' must not be specified when 'model' is an ONNX model")
            self._given_onnx = model
        else:
            raise ValueError("'model' must be either 'torch.nn.Module' or 'onnx.ModelProto'")
        self.loss_fn = loss_fn
        self.model_desc: _ORTTrainerModelDesc = _ORTTrainerModelDesc(model_desc)
        losses = sum(one.is_loss for one in self.model_desc.outputs)
        require(losses == 1, f"Only one loss output is supported ({losses} were specified)")
        is_first = loss_fn is None or self.model_desc.loss_index == 0
        require(is_first, "the loss that 'loss_fn' computes must be the first of the outputs in 'model_desc'")
        self.optim_config = optim_config
        self._device = training_device(options)
        self.options: ORTTrainerOptions = ORTTrainerOptions() if options is None else options
        self.options._settle()
        self._train_step_info = TrainStepInfo(optim_config)
        self._running: RunningModel | None = None
        self._waiting: tuple[Mapping[str, Any], bool] | None = None
        self._example: list[Tensor] = []
        self._guarded = GuardedSteps()
        self._is_fresh = True

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy or a pickle, which compiles steps of its own and continues from the state."""
        waiting = self._waiting if self._running is None else (self.state_dict(), True)
        return vars(self) | {"_running": None, "_waiting": waiting, "_train_step_info": self._train_step_info._copy()}

    # -- steps ---------------------------------------------------------------------------------------------------------

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss and its gradients, and update the weights or gather the gradients for a later update.

        The first call compiles, and takes longer.

        Args:
            args: tensors, in the order of model_desc; or one list of them.
            kwargs: tensors by their names in model_desc, after the positional ones.

        Returns:
            The outputs, in the order of model_desc or of the step info's `fetches`; a tensor where there is one.

        Raises:
            AssertionError: there are more or fewer inputs than model_desc has, or sizes of one name differ.
            InvalidArgumentError: the step failed, and an input has another shape than model_desc says.
            RuntimeError: `fetches` has an unknown name.
            OrtDynamoError: the step cannot be compiled or run.
        """
        inputs = self._inputs(args, kwargs)
        wanted = self._wanted()
        outputs = self._guarded("train_step", lambda: self._train(inputs), inputs, self.model_desc.inputs)
        self._remember(inputs)
        return self._selected(outputs, wanted)

    def _train(self, inputs: list[Tensor]) -> list[Tensor]:
        running = self._run(inputs)
        info, options = self._train_step_info, self.options
        info.step += 1
        running.change_steps(gathers=options.batch.gradient_accumulation_steps, clips=options.utils.grad_norm_clip)
        updates = info.step % running.kind.gathers == 0
        scaler = options.mixed_precision.loss_scaler if options.mixed_precision.enabled else None
        try:
            lr = self.optim_config.lr if options.lr_scheduler is None else options.lr_scheduler._step(info)[0]
            if self._is_fresh:
                self._before_first_step(running, inputs, float(lr))
            scale = 1.0 if scaler is None else scaler.loss_scale
            outputs, all_finite = running.train(inputs, float(lr), float(scale), updates=updates)
        except BaseException:
            info.step -= 1  # a failed step does not count: the number of a step decides whether it updates
            raise
        if updates:
            if scaler is not None:
                info.all_finite = all_finite
                scaler.update(info)
            info.optimization_step += all_finite
        return outputs

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in evaluation mode, without gradients: dropout is off, and no buffer changes.

        Arguments, results and errors are those of `train_step`. Where the step info's `fetches` leave out the loss of a
        loss_fn, the label may be left out, too.
        """
        wanted = self._wanted()
        predicts = self.loss_fn is not None and self.model_desc.loss_index not in wanted
        inputs = self._inputs(args, kwargs, may_lack_label=predicts)
        lacks_label = len(inputs) < len(self.model_desc.inputs)

        def run() -> list[Tensor]:
            running = self._run(inputs)
            return running.predict(inputs) if lacks_label else running.evaluate(inputs)

        outputs = self._guarded("eval_step", run, inputs, self.model_desc.inputs)
        self._remember(inputs)
        return self._selected(outputs, [index - 1 for index in wanted] if lacks_label else wanted)

    @torch.inference_mode(False)  # copies are tensors that a backward may save
    def _inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, may_lack_label: bool = False
    ) -> list[Tensor]:
        given = list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else list(args)
        names = [one.name for one in self.model_desc.inputs]
        unknown = sorted(kwargs.keys() - set(names))
        require(not unknown, f"model_desc has no inputs {unknown}")
        given += [kwargs[name] for name in names if name in kwargs]
        if may_lack_label and len(given) == len(names) - 1 and names[-1] not in kwargs:
            names = names[:-1]
        require(len(given) == len(names), f"model_desc has {len(names)} inputs, and {len(given)} are given")
        if self._running is None:
            check_device(self._device)
        return [self._tensor(value, name) for value, name in zip(given, names, strict=True)]

    def _tensor(self, value: Any, name: str) -> Tensor:
        require(isinstance(value, (Tensor, int, float)), f"the input '{name}' is {type(value).__name__}, not a tensor")
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        return tensor.to(self._device, copy=tensor.is_inference())

    def _wanted(self) -> list[int]:
        names = [one.name for one in self.model_desc.outputs]
        fetches = self._train_step_info.fetches or names
        if not set(fetches) <= set(names):
            raise RuntimeError("The specified fetches list contains invalid output names")
        return [names.index(name) for name in fetches]

    @staticmethod
    def _selected(outputs: Sequence[Tensor], wanted: Sequence[int]) -> Any:
        results = [outputs[index] for index in wanted]
        return results[0] if len(results) == 1 else results

    @property
    def _training_session(self) -> TrainedWeights | None:
        """Answers for programs that asked the first trainer's session; None before the first step."""
        return None if self._running is None else TrainedWeights(self._running.state)

    @property
    def _onnx_model(self) -> onnx.ModelProto | None:
        """The given ONNX model; for a torch model, the one that `save_as_onnx` would write."""
        return self._current_model() if self._given_onnx is None and self._example else self._given_onnx

    # -- the running model ---------------------------------------------------------------------------------------------

    def _run(self, inputs: Sequence[Tensor]) -> RunningModel:
        """Return the model that runs, made at the first step."""
        if self._running is None:
            self._running = self._build_model(inputs)
            if self._waiting is not None:
                try:
                    self._load(*self._waiting)
                except BaseException:
                    self._running = None  # the next step tries again, rather than train weights that were not loaded
                    raise
                self._waiting = None
        return self._running

    def _remember(self, inputs: Sequence[Tensor]) -> None:
        """Keep the inputs of the first step that succeeds with all of them, as an example for files."""
        if not self._example and len(inputs) == len(self.model_desc.inputs):
            self._example = list(inputs)
            for index, tensor in enumerate(inputs):
                self.model_desc.add_type_to_input_description(index, tensor.dtype)

    def _build_model(self, inputs: Sequence[Tensor]) -> RunningModel:
        self.options._settle()
        parts = Parts(self.model_desc, self.optim_config, self.options, self._device)
        if self._given_onnx is not None:
            return parts.of_onnx(self._given_onnx)
        assert self._torch_model is not None
        return parts.of_module(self._torch_model, self.loss_fn, inputs)

    def _before_first_step(self, running: RunningModel, inputs: Sequence[Tensor], lr: float) -> None:
        """Make the checks and files that debug options ask for, once."""
        if self.options.debug.check_model_export:
            check_export(running, self._files(running), self.model_desc, inputs)
        self._files(running).write_for_debugging(self.options, inputs, lr)
        self._is_fresh = False

    # -- files ---------------------------------------------------------------------------------------------------------

    def _files(self, running: RunningModel) -> StepFiles:
        return step_files(running, self.model_desc, self.optim_config, self.options)

    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the model and its loss with the current weights to an ONNX file, for inference.

        Any InferenceSession can run it. Its inputs and outputs are those of model_desc. A trainer of an ONNX model
        writes that model with the current weights. Before the first step, this warns and writes nothing.

        Args:
            path: the file, in an existing folder; an existing file is replaced.

        Raises:
            ValueError: path is not a file in an existing folder.
            TrainingGraphError: an operator has no form in ONNX.
        """
        if not self._example:
            message = (
                "Training session is not initialized yet. 'train_step' or 'eval_step' methods must be executed at "
                "least once before calling 'save_as_onnx()'."
            )
            warnings.warn(message, _NotYetWarning, stacklevel=2)
            return
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise ValueError("'path' must be a valid path string")
        target = Path(path)
        if not target.name or not target.parent.is_dir() or target.is_dir():
            raise ValueError(f"'path' is not valid or does not exist: {path}")
        write_model(ir.from_proto(self._current_model()), target)

    def _current_model(self) -> onnx.ModelProto:
        """Return the forward with the current weights."""
        running = self._running
        assert running is not None
        if running.shares_layers:
            reason = "no process has all of the model to write. Aggregate checkpoints, and write it in one process"
            raise SeveralProcessesError(reason=reason)
        if isinstance(running.combined, OnnxCombined):
            return running.combined.model_proto()
        return ir.to_proto(self._files(running).forward(self._example))

    # -- states --------------------------------------------------------------------------------------------------------

    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Return weights, optimizer state and everything else that a resumed training needs.

        Args:
            pytorch_format: return only what the model's own state_dict has, in full precision, on the CPU.

        Returns:
            A dict of copies (`help migrating_from_orttrainer` has the schema). Before the first step it is the
            one that `load_state_dict` was given, or empty.
        """
        if self._running is None:
            message = (
                "ONNX Runtime training session is not initialized yet. "
                "Please run train_step or eval_step at least once before calling ORTTrainer.state_dict()."
            )
            warnings.warn(message, UserWarning, stacklevel=2)
            return copied_state(self._waiting[0]) if self._waiting is not None else {}
        if pytorch_format:
            return torch_state(self._running.state, self._running.combined.model)
        return trainer_state(self._running, self._train_step_info, self.options, self.optim_config)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a dictionary from `state_dict`; before the first step, it is loaded at that step.

        Args:
            state_dict: a dictionary in the trainer's own schema. Missing sections do not change the trainer.
            strict: raise if names are missing or unknown; a missing section only gives a warning.

        Raises:
            AssertionError: the state has another optimizer.
            RuntimeError: names are missing or unknown, or an array has another shape.
        """
        if not isinstance(state_dict, Mapping):
            raise RuntimeError(f"state_dict is {type(state_dict).__name__}, where a dict is expected")
        if self._running is None:
            self._waiting = copied_state(state_dict), strict
        else:
            self._load(state_dict, strict)

    def _load(self, given: Mapping[str, Any], strict: bool) -> None:
        assert self._running is not None
        load_trainer_state(given, self._running, self._train_step_info, self.options, self.optim_config, strict=strict)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str] | Any,
        user_dict: Mapping[str, Any] = {},
        include_optimizer_states: bool = True,
    ) -> None:
        """Save the trainer's state to a file, completely or not at all.

        Args:
            path: a new file, or a file-like object.
            user_dict: a value that `load_checkpoint` returns: JSON values, arrays, and dicts and lists of these.
            include_optimizer_states: also save the optimizer's state.

        Raises:
            FileExistsError: the file exists.
            TypeError: user_dict has a value of another type.
        """
        save_state(path, self.state_dict(), dict(user_dict), include_optimizer_states)

    def load_checkpoint(self, *paths: str | os.PathLike[str], strict: bool = True, allow_pickle: bool = False) -> Any:
        """Load a checkpoint of `save_checkpoint`; several files, of several processes, are put together.

        Args:
            paths: one file, or those of all processes.
            strict: as for `load_state_dict`.
            allow_pickle: unpickle the user_dict of a file that ORTTrainer of ONNX Runtime wrote. A pickle can run any
                program: allow it for files that you trust.

        Returns:
            The user_dict.

        Raises:
            CheckpointFileError: a file is damaged or none of ours.
        """
        state_dict, user_dict = load_state(paths, allow_pickle=allow_pickle)
        self.load_state_dict(state_dict, strict=strict)
        return user_dict
