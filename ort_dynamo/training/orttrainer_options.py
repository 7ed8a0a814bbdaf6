"""ORTTrainerOptions: how an ORTTrainer trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from ort_dynamo.embedding import nearest
from ort_dynamo.training.amp.loss_scaler import DynamicLossScaler, LossScaler
from ort_dynamo.training.option_schema import FREE, SPELLINGS, checked, copied

__all__ = ["ORTTrainerOptions"]

_OWN = ("_validated_opts", "_filled_scaler")


class ORTTrainerOptions:
    """Options of an ORTTrainer, grouped in levels.

    `ORTTrainerOptions({"utils": {"grad_norm_clip": False}})` gives one, and `options.utils.grad_norm_clip` reads it.
    Options may be assigned to until a trainer is made: an assigned value is checked as the dict is.

    Args:
        options: the options that differ from their defaults: a dict of dicts. It is copied; the objects in it are not.
        _validate: check the options and fill in defaults.

    Attributes:
        batch.gradient_accumulation_steps: steps for each update of the weights; an int, 1.
        device.id: "cpu", "cuda" or "cuda:N"; "cuda".
        device.mem_limit: bytes of GPU memory that ONNX Runtime may take; 0 is no limit.
        distributed.world_rank: number of this process; 0.
        distributed.world_size: number of processes; 1.
        distributed.local_rank: number of this process on its machine; 0.
        distributed.data_parallel_size: world_size // horizontal_parallel_size // stages, set here and by the trainer.
        distributed.horizontal_parallel_size: processes that share each layer; 1.
        distributed.pipeline_parallel.pipeline_parallel_size: stages of a pipeline; 1.
        distributed.pipeline_parallel.num_pipeline_micro_batches: parts that a batch is cut into; 1.
        distributed.pipeline_parallel.pipeline_cut_info_string: names of modules at which stages begin, by commas; "".
        distributed.pipeline_parallel.sliced_schema: shapes of tensors that are cut, by name; {}.
        distributed.pipeline_parallel.sliced_axes: axes along which they are cut, by name; {}.
        distributed.pipeline_parallel.sliced_tensor_names: tensors that are cut; [].
        distributed.allreduce_post_accumulation: reduce gradients over processes after their accumulation; False.
        distributed.deepspeed_zero_optimization.stage: 1 divides the optimizer's state among processes; 0.
        distributed.enable_adasum: reduce gradients by Adasum; False.
        lr_scheduler: a scheduler of ort_dynamo.optim, or a subclass of its _LRScheduler; None.
        mixed_precision.enabled: compute in float16, with float32 weights; False.
        mixed_precision.loss_scaler: a scaler of ort_dynamo.amp; None is a DynamicLossScaler() if enabled.
        graph_transformer.attn_dropout_recompute: recompute attention's dropout; False.
        graph_transformer.gelu_recompute: recompute Gelu; False.
        graph_transformer.transformer_layer_recompute: recompute transformer layers; False.
        graph_transformer.number_recompute_layers: so many of them; 0 is all but the last.
        graph_transformer.allow_layer_norm_mod_precision: fuse layer norms across casts; False.
        graph_transformer.propagate_cast_ops_config.strategy: a PropagateCastOpsStrategy; FLOOD_FILL.
        graph_transformer.propagate_cast_ops_config.level: -1 moves no casts, 0 over `allow`, 1 and 2 over more; 1.
        graph_transformer.propagate_cast_ops_config.allow: types of operators; [].
        utils.frozen_weights: names of parameters that are not trained; [].
        utils.grad_norm_clip: clip the norm of gradients for Adam and Lamb; True.
        utils.memory_efficient_gradient: form gradients from inputs rather than from outputs; False.
        utils.run_symbolic_shape_infer: infer symbolic shapes; False.
        debug.deterministic_compute: use deterministic kernels; False.
        debug.check_model_export: compare the graph's outputs with the model's before the first step; False.
        debug.graph_save_paths.model_after_graph_transforms_path: a file; "" is none, as for the three below.
        debug.graph_save_paths.model_with_gradient_graph_path: a file.
        debug.graph_save_paths.model_with_training_graph_path: a file.
        debug.graph_save_paths.model_with_training_graph_after_optimization_path: a file.
        provider_options: options of execution providers, by the providers' names; {}.
        session_options: an onnxruntime.SessionOptions; None.

    Raises:
        ValueError: "Invalid options: ..." with all that is wrong, by its place; or a loss scaler without mixed
            precision.
        AttributeError: there is no option of this name; the message has the nearest one.
    """

    def __init__(self, options: dict[str, Any] = {}, _validate: bool = True) -> None:  # noqa: B006  # copied
        self._validated_opts: dict[str, Any] = checked(options) if _validate else copied(options)
        self._filled_scaler: LossScaler | None = None
        if _validate:
            self._settle()

    def _settle(self) -> None:
        """Make options that depend on one another agree; an ORTTrainer does so again, as they may have been changed.

        Raises:
            ValueError: there is a loss scaler, but no mixed precision, or more processes share layers or a
                pipeline than there are.
        """
        mixed, distributed = self._validated_opts["mixed_precision"], self._validated_opts["distributed"]
        if mixed["enabled"] and mixed["loss_scaler"] is None:
            mixed["loss_scaler"] = self._filled_scaler = DynamicLossScaler()
        elif not mixed["enabled"] and mixed["loss_scaler"] is not None:
            if mixed["loss_scaler"] is not self._filled_scaler:
                raise ValueError("Loss Scaler cannot be specified when Mixed Precision is not enabled")
            mixed["loss_scaler"] = self._filled_scaler = None
        size = distributed["world_size"] // distributed["horizontal_parallel_size"]
        if size == 0:
            _refuse({"horizontal_parallel_size": ["must not exceed world_size"]})
        size //= distributed["pipeline_parallel"]["pipeline_parallel_size"]
        if size == 0:
            error = {"pipeline_parallel_size": ["must not exceed world_size // horizontal_parallel_size"]}
            _refuse({"pipeline_parallel": [error]})
        distributed["data_parallel_size"] = size

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):  # before __init__, and where copy and pickle ask
            raise AttributeError(name)
        return _read(self, (), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            _assign(self, (), name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._validated_opts})

    def __repr__(self) -> str:
        return repr(self._validated_opts)


class _Level:
    """One level of the options: it reads and writes the options that it belongs to."""

    __slots__ = ("_options", "_path")
    _options: ORTTrainerOptions
    _path: tuple[str, ...]

    def __init__(self, options: ORTTrainerOptions, path: tuple[str, ...]) -> None:
        object.__setattr__(self, "_options", options)
        object.__setattr__(self, "_path", path)

    @property
    def _validated_opts(self) -> dict[str, Any]:
        """The options of this level, as a dict."""
        return _at(self._options, self._path)

    def __getattr__(self, name: str) -> Any:
        if name in _Level.__slots__ or name.startswith("__"):
            raise AttributeError(name)
        return _read(self._options, self._path, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _assign(self._options, self._path, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Level, (self._options, self._path)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *map(str, self._validated_opts)})

    def __repr__(self) -> str:
        return repr(self._validated_opts)


def _refuse(error: dict[str, Any]) -> NoReturn:
    """Raise an error for an option of `distributed` that conflicts with others."""
    raise ValueError(f"Invalid options: { {'distributed': [error]} }")


def _read(options: ORTTrainerOptions, path: tuple[str, ...], name: str) -> Any:
    place = SPELLINGS.get((*path, name), (*path, name))
    level = _at(options, place[:-1])
    if place[-1] not in level:
        raise _unknown(place, level)
    value = level[place[-1]]
    return _Level(options, place) if isinstance(value, dict) else value


def _assign(options: ORTTrainerOptions, path: tuple[str, ...], name: str, value: Any) -> None:
    place = SPELLINGS.get((*path, name), (*path, name))
    level = _at(options, place[:-1])
    if place[-1] not in level and not any(place[: len(free)] == free for free in FREE):
        raise _unknown(place, level)
    trial = copied(options._validated_opts)
    _inside(trial, place[:-1])[place[-1]] = value = copied(value)
    places = [place]
    for old, new in SPELLINGS.items():  # a level that is given whole, with an option that belongs elsewhere
        if old[:-1] == place != new[:-1] and isinstance(value, dict) and old[-1] in value:
            _inside(trial, new[:-1])[new[-1]] = value.pop(old[-1])
            places.append(new)
    found = checked(trial)
    for *around, last in places:  # the others stay the objects that they are
        _inside(options._validated_opts, around)[last] = _inside(found, around)[last]


def _at(options: ORTTrainerOptions, path: tuple[str, ...]) -> dict[str, Any]:
    return _inside(options._validated_opts, path)


def _inside(values: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    for key in path:
        values = values[key]
    return values


def _unknown(place: tuple[str, ...], level: dict[str, Any]) -> AttributeError:
    near = nearest(place[-1], [name for name in level if isinstance(name, str)])
    return AttributeError(f"ORTTrainerOptions has no option {'.'.join(place)!r}{near}")
