"""The state of a trainer as a dict of arrays, in ORTTrainer's schema, and back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ort_dynamo.training.trainer.training_state import (
    TrainedWeight,
    TrainingState,
    UpdateGroup,
    local_of,
    part_of,
    split_axis,
)
from ort_dynamo.training.trainer.update_rules import LambRule

__all__ = [
    "TrainedWeights",
    "check_keys",
    "copied_state",
    "extra_section",
    "gathered_section",
    "load_extra",
    "load_gathered",
    "load_model",
    "load_optimizer",
    "model_section",
    "optimizer_section",
    "own_part",
    "partition_section",
    "section_of",
    "shares_section",
    "torch_state",
]

_FULL = "full_precision"
_OLD_FULL = "fp32"
"""Its name in the first files."""

_EXTRA = "extra_state"
_SHARED = "shared_optimizer_state"
_MOMENTS = ("Moment_1", "Moment_2")

_Section = dict[str, Any]


class TrainedWeights:
    """Answers the questions that programs asked the first ORTTrainer's session.

    Args:
        state: the trained state.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def get_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Give trained weights, and moments, as arrays by name; frozen weights are not among them."""
        found = {weight.name: _array(weight.master) for weight in self._state.weights}
        for weight in self._state.weights:
            names = (f"{key}_{weight.name}" for key in _MOMENTS)
            found.update({name: _array(one) for name, one in zip(names, weight.moments, strict=False)})
        return found


def model_section(state: TrainingState, module: nn.Module) -> _Section:
    """Give all weights and buffers in full precision, as arrays: trained weights, frozen weights, and buffers."""
    return {_FULL: {name: _array(_full(state, name, one)) for name, one in _tensors(module).items()}}


def extra_section(module: nn.Module) -> _Section:
    """Give copies of what modules add to their state by `get_extra_state`, by its names in torch's state_dict."""
    return {name: copy.deepcopy(value) for name, value in module.state_dict().items() if _is_extra(name)}


def torch_state(state: TrainingState, module: nn.Module) -> dict[str, Any]:
    """Give what the model's own state_dict has: weights and buffers as tensors in full precision, and extra state."""
    arrays = model_section(state, module)[_FULL]
    return {name: torch.from_numpy(array) for name, array in arrays.items()} | extra_section(module)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's weights and buffers, by their names in its state_dict."""
    return {name: one for name, one in module.state_dict().items() if not _is_extra(name)}


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == "_extra_state"


def optimizer_section(state: TrainingState) -> _Section:
    """Give moments and counts. A count begins at 1, as ONNX Runtime's does, and is one more after each update."""
    found: _Section = {}
    for group in state.groups:
        if not group.rule.moments:
            continue
        count = np.array([int(group.count) + 1], dtype=np.int64)
        for weight in group.weights:
            if not weight.is_own:
                continue
            found[weight.name] = {key: _array(one) for key, one in zip(_MOMENTS, weight.moments, strict=True)}
            if isinstance(group.rule, LambRule):
                found[_SHARED] = {"step": count.copy()}
            else:
                found[weight.name]["Update_Count"] = count.copy()
    return found


def own_part(section: _Section, state: TrainingState, *, is_first: bool) -> _Section:
    """Give a process's part of the model where ZeRO divides it: its own weights; the first one, all else, too."""
    others = {weight.name for weight in state.weights if not weight.is_own}
    shared = {name for name in section[_FULL] if state.master_of(name) is None or state.name_of(name) != name}
    left_out = others if is_first else others | shared
    return {_FULL: {name: value for name, value in section[_FULL].items() if name not in left_out}}


def partition_section(state: TrainingState) -> _Section:
    """Give the shapes of the weights that ZeRO divides, which `aggregate_checkpoints` joins."""
    return {weight.name: {"original_dim": np.array(weight.parameter.shape, dtype=np.int64)} for weight in state.weights}


def shares_section(module: nn.Module) -> _Section:
    """Give the shapes of weights whose parts processes have, and along which axis they were divided."""
    found = {name: (tuple(one.shape), split_axis(one)) for name, one in _tensors(module).items()}
    return {
        name: {
            "original_dim": np.array(shape, dtype=np.int64),
            "megatron_row_partition": np.array([1 if axis == 0 else 0], dtype=np.int64),
        }
        for name, (shape, axis) in found.items()
        if axis is not None
    }


def check_keys(current: Mapping[str, Any], given: Mapping[str, Any], free: Container[str] = ()) -> None:
    """Compare the keys of a state_dict with the expected ones; a section that is not there is warned of.

    Args:
        current: the expected keys: of the model, all.
        given: its keys.
        free: weights that may be there or not: ZeRO gives them to other processes.

    Raises:
        RuntimeError: "Missing keys: [...] in ..." or "Unexpected keys: [...] in ...".
    """
    for section in ("model", "optimizer"):
        if section not in given:
            if current[section]:  # SGD keeps nothing
                warnings.warn(f"Missing key: {section} in state_dict", UserWarning, stacklevel=4)
            continue
        place = f"state_dict[{section}]"
        own, other = current[section], _renamed(section_of(given, section))
        _check_same(own, other, place, free)
        for key in own:
            _check_same(own[key], _mapping(other[key], f"{place}[{key}]"), f"{place}[{key}]", free)


def _check_same(own: Iterable[str], other: Iterable[str], place: str, free: Container[str]) -> None:
    """Compare keys but for those that are free to be there or not."""
    own, other = ([key for key in keys if key not in free] for keys in (own, other))
    if missing := [key for key in own if key not in other]:
        raise RuntimeError(f"Missing keys: {missing} in {place}")
    if unexpected := [key for key in other if key not in own]:
        raise RuntimeError(f"Unexpected keys: {unexpected} in {place}")


def load_model(
    state: TrainingState, module: nn.Module, given: Mapping[str, Any], *, strict: bool
) -> Callable[[], None]:
    """Make ready to load weights and buffers, which the returned function does; values that are not given stay.

    Raises:
        RuntimeError: "Unexpected key: k in state_dict[model][precision]", if strict; or an array has another shape.
    """
    own = _tensors(module)
    taken: list[tuple[Tensor, Tensor]] = []
    for precision, section in _renamed(section_of(given, "model")).items():
        for name, value in _mapping(section, f"state_dict[model][{precision}]").items():
            if name in own:
                target = _full(state, name, own[name])
                value = _part(value, own[name])
                taken.append((target, _like(value, target, f"state_dict[model][{precision}][{name}]")))
            elif strict:
                raise RuntimeError(f"Unexpected key: {name} in state_dict[model][{precision}]")

    def load() -> None:
        _copy(taken)
        state.round()

    return load


def _copy(taken: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for target, value in taken:
            target.copy_(value)


def load_optimizer(state: TrainingState, given: Mapping[str, Any]) -> Callable[[], None]:
    """Make ready to load moments and counts, which the returned function does; values that are not given stay.

    Raises:
        RuntimeError: an array has another shape, or a count is below 1.
    """
    section = section_of(given, "optimizer")
    shared = _mapping(section.get(_SHARED, {}), f"state_dict[optimizer][{_SHARED}]").get("step")
    taken: list[tuple[Tensor, Tensor]] = []
    counts: dict[str, int] = {}
    for group in state.groups:
        for weight in group.weights:
            taken += _load_weight(group, weight, section.get(weight.name, {}), shared, counts)

    def load() -> None:
        _copy(taken)
        if counts:
            state.regroup(counts)

    return load


def load_extra(module: nn.Module, given: Mapping[str, Any], *, strict: bool) -> Callable[[], None]:
    """Make ready to give modules the extra state that they had, which the returned function does.

    Raises:
        RuntimeError: "Missing keys: [...] in state_dict[extra_state]", or "Unexpected keys: [...]", if strict.
    """
    section = section_of(given, _EXTRA)
    named = {name: module.get_submodule(name.rpartition(".")[0]) for name in module.state_dict() if _is_extra(name)}
    takers = {name: one for name, one in named.items() if type(one).set_extra_state is not nn.Module.set_extra_state}
    if strict and takers and _EXTRA not in given:
        warnings.warn(f"Missing key: {_EXTRA} in state_dict", UserWarning, stacklevel=4)
    elif strict:
        _check_same(takers, section, f"state_dict[{_EXTRA}]", ())

    def load() -> None:
        for name, taker in takers.items():
            if name in section:
                taker.set_extra_state(copy.deepcopy(section[name]))

    return load


def gathered_section(state: TrainingState) -> _Section:
    """Give the sums of gradients since the last update, of the weights that have had one."""
    reached = (one for one in state.weights if one.name in state.reached)
    return {one.name: _array(one.gathered) for one in reached if one.gathered is not None}


def load_gathered(state: TrainingState, given: Mapping[str, Any]) -> Callable[[], None]:
    """Make ready to load sums of gradients, which the returned function does; a sum that is not given is none.

    Raises:
        RuntimeError: an array has another shape.
    """
    section = section_of(given, "gathered_gradients")
    taken = []
    for one in state.weights:
        if one.name in section:
            like, part = one.master if one.gathered is None else one.gathered, _part(section[one.name], one.parameter)
            taken.append((one, _like(part, like, f"state_dict[gathered_gradients][{one.name}]")))

    def load() -> None:
        state.forget_gathered()
        _copy((one.gathered, value) for one, value in taken if one.gathered is not None)
        state.reached.update(one.name for one, _ in taken if one.gathered is not None)

    return load


def copied_state(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state_dict, with arrays and tensors of its own; values of other types are the given ones."""
    return {name: copy.deepcopy(value) if name == _EXTRA else _copied(value) for name, value in given.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return copied_state(value)
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return list(value) if isinstance(value, list) else value


def section_of(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a state_dict, empty where it is not there; raises RuntimeError where it is no dict."""
    return _mapping(given.get(name, {}), f"state_dict[{name}]")


def _load_weight(
    group: UpdateGroup, weight: TrainedWeight, given: Any, shared: Any, counts: dict[str, int]
) -> list[tuple[Tensor, Tensor]]:
    place = f"state_dict[optimizer][{weight.name}]"
    given = _mapping(given, place)
    count = shared if isinstance(group.rule, LambRule) else given.get("Update_Count")
    if count is not None and group.rule.moments:
        counts[weight.name] = _count(count, place)
    keys = zip(_MOMENTS, weight.moments, strict=False)
    given = {key: _part(value, weight.parameter) if key in _MOMENTS else value for key, value in given.items()}
    return [(moment, _like(given[key], moment, f"{place}[{key}]")) for key, moment in keys if key in given]


def _count(value: Any, place: str) -> int:
    array = np.asarray(value)
    if array.size != 1 or not np.issubdtype(array.dtype, np.integer) or int(array.reshape(())) < 1:
        raise RuntimeError(f"{place} has {value!r} for the count of updates; expected an integer >= 1")
    return int(array.reshape(())) - 1


def _part(value: Any, like: Tensor) -> Any:
    """Return this process's part of an array that covers a whole weight."""
    if split_axis(like) is None or not isinstance(value, (Tensor, np.ndarray)):
        return value
    return part_of(torch.as_tensor(value), like)


def _like(value: Any, target: Tensor, place: str) -> Tensor:
    found = value.detach() if isinstance(value, Tensor) else _tensor(value, place)
    if found.shape != target.shape:
        raise RuntimeError(f"{place} has the shape {list(found.shape)}, where {list(target.shape)} is expected")
    return found


def _tensor(value: Any, place: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(value))  # a copy, that may be written to
    except TypeError as error:
        raise RuntimeError(f"{place} is not an array of numbers") from error


def _mapping(section: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(section, Mapping):
        raise RuntimeError(f"{place} is {type(section).__name__}, where a dict is expected")
    return section


def _full(state: TrainingState, name: str, own: Tensor) -> Tensor:
    """Return the master of an entry of the model's state_dict, or the entry if it is not trained."""
    master = state.master_of(name)
    return local_of(own.detach()) if master is None else master


def _renamed(section: Mapping[str, Any]) -> dict[str, Any]:
    return {_FULL if key == _OLD_FULL else key: value for key, value in section.items()}


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a copy as an array; bfloat16 and float8, which NumPy lacks, become float32 without loss."""
    own = tensor.detach().cpu()
    is_lacking = own.is_floating_point() and own.dtype not in (torch.float64, torch.float32, torch.float16)
    own = own.float() if is_lacking else own.clone()
    return own.numpy()
