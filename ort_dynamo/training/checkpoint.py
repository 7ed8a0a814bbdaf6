"""Checkpoints of ORTTrainer: save and load for its methods, and joining of the files of several ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from ort_dynamo.errors import CheckpointFileError
from ort_dynamo.training import _checkpoint_storage
from ort_dynamo.training.checkpointing import user_values
from ort_dynamo.training.checkpointing.aggregation import aggregate, needs_aggregation
from ort_dynamo.training.checkpointing.array_types import tensor_of
from ort_dynamo.training.checkpointing.experimental import (
    experimental_load_checkpoint,
    experimental_load_state_dict,
    experimental_save_checkpoint,
    experimental_state_dict,
)
from ort_dynamo.training.checkpointing.sealed_file import PathOrFile, describe
from ort_dynamo.training.checkpointing.state_sections import check_sections

__all__ = [
    "aggregate_checkpoints",
    "experimental_load_checkpoint",
    "experimental_load_state_dict",
    "experimental_save_checkpoint",
    "experimental_state_dict",
    "load_state",
    "save_state",
]


def aggregate_checkpoints(paths: Sequence[PathOrFile], pytorch_format: bool = True) -> dict[str, Any]:
    """Join the checkpoint files of all ranks of one run into one state.

    Args:
        paths: the files that `ORTTrainer.save_checkpoint` wrote on ranks 0 to n-1, in any order.
        pytorch_format: True for the weights alone, as `torch.nn.Module.load_state_dict` takes them; False for a state
            as `ORTTrainer.state_dict()` has it, of one trainer that is not distributed, with rank 0's `user_dict` (of
            a file of onnxruntime.training's, the hexadecimal text of its pickle).

    Returns:
        {name: tensor} on the CPU, in full precision, with rank 0's extra state of modules; or the nested dictionary.

    Raises:
        AssertionError: a rank is missing or of another run, or states that should be equal are not.
        CheckpointFileError, OSError: a file cannot be read.
    """
    state = aggregate(paths)
    _decode_extra_state(state, paths)
    if pytorch_format:
        weights = state.get("model", {}).get("full_precision", {})
        return {name: tensor_of(value) for name, value in weights.items()} | state.get(_EXTRA, {})
    if isinstance(state.get("user_dict"), Mapping):
        state["user_dict"] = _decoded(state["user_dict"], "user_dict", paths)
    return state


def save_state(
    path: PathOrFile, state_dict: Mapping[str, Any], user_dict: Mapping[Any, Any], include_optimizer_states: bool
) -> None:
    """Save a state from `ORTTrainer.state_dict()`, and a user's dictionary, as a new file.

    Args:
        path: a new file, which is written completely or not at all, or an empty binary file object.
        state_dict: nested dictionaries of arrays, scalars and text; `optimizer` may be missing, and `extra_state` holds
            what a user_dict may hold.
        user_dict: None, bool, int, float, str, bytes, NumPy arrays and scalars, tensors, in dicts, lists and tuples.
        include_optimizer_states: False omits the section `optimizer`.

    Raises:
        FileExistsError: the path exists.
        OSError: the file cannot be written.
        TypeError: a value cannot be stored; the message names it.
    """
    content = {key: value for key, value in state_dict.items() if include_optimizer_states or key != "optimizer"}
    if _EXTRA in content:
        content[_EXTRA] = user_values.encode(content[_EXTRA], f"state_dict[{_EXTRA}]")
    encoded = user_values.encode(user_dict)
    if user_dict:
        content["user_dict"] = encoded
    _checkpoint_storage.save(content, path)


def load_state(paths: Sequence[PathOrFile], allow_pickle: bool = False) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Load files of `save_state` or onnxruntime.training: one file, or those of all ranks where states are split.

    Args:
        paths: the files, in any order.
        allow_pickle: unpickle the user's dictionary of a file of onnxruntime.training's. It can run anything: only for
            files whose source you trust.

    Returns:
        The state, as `ORTTrainer.state_dict()` has it, and the user's dictionary, {} if there is none.

    Raises:
        AssertionError: several files where one has all the states; or see `aggregate_checkpoints`.
        CheckpointFileError: a file is damaged or no checkpoint, or `user_dict` is pickled and `allow_pickle` is False.
        OSError: a file cannot be opened.
    """
    assert len(paths) > 0, "Expected number of files to load: at least 1, got 0"
    options = _load_options(paths[0])
    if options and needs_aggregation(options):
        state = aggregate(paths)
    else:
        assert len(paths) == 1, f"Expected number of files to load: 1, got {len(paths)}"
        state = check_sections(_checkpoint_storage.load(paths[0]), paths[0])
    _decode_extra_state(state, paths)
    saved = state.pop("user_dict", None)
    if saved is None:
        return state, {}
    if isinstance(saved, Mapping):
        return state, _decoded(saved, "user_dict", paths)
    return state, _unpickle_user_dict(saved, paths, allow_pickle)


def _load_options(path: PathOrFile) -> dict[str, Any]:
    """Load the trainer options, {} where a trainer was saved before its first step and had none."""
    try:
        loaded = {"trainer_options": _checkpoint_storage.load(path, key="trainer_options")}
    except KeyError:
        if not _checkpoint_storage.is_sealed(path):
            reason = "it is HDF5 without trainer_options, so it is not a checkpoint of an ORTTrainer"
            raise CheckpointFileError(path=describe(path), reason=reason) from None
        return {}
    options: dict[str, Any] = check_sections(loaded, path)["trainer_options"]
    for key, default in (("zero_stage", 0), ("horizontal_parallel_size", 1), ("pipeline_parallel_size", 1)):
        if not isinstance(options.setdefault(key, default), int):
            raise CheckpointFileError(path=describe(path), reason=f"its trainer option {key!r} is not an integer")
    return options


_EXTRA = "extra_state"
"""The section of what modules add to their state, encoded like a user's dictionary."""


def _decode_extra_state(state: dict[str, Any], paths: Sequence[PathOrFile]) -> None:
    if _EXTRA in state:
        state[_EXTRA] = _decoded(state[_EXTRA], _EXTRA, paths)


def _decoded(encoded: Any, section: str, paths: Sequence[PathOrFile]) -> dict[Any, Any]:
    try:
        decoded: dict[Any, Any] = user_values.decode(encoded)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointFileError(path=_names(paths), reason=f"its {section} cannot be decoded: {error!r}") from error
    return decoded


def _unpickle_user_dict(pickled: Any, paths: Sequence[PathOrFile], allowed: bool) -> Any:
    if not allowed:
        reason = (
            "its user_dict is a pickle, as onnxruntime.training saved it, and to load a pickle can run anything. "
            "If you trust the file's source, load it with load_checkpoint(..., allow_pickle=True)"
        )
        raise CheckpointFileError(path=_names(paths), reason=reason)
    try:
        content = bytes.fromhex(pickled)
    except (TypeError, ValueError) as error:
        reason = f"its user_dict is not the hexadecimal text of a pickle: {error}"
        raise CheckpointFileError(path=_names(paths), reason=reason) from error
    return pickle.loads(content)


def _names(paths: Sequence[PathOrFile]) -> str:
    return ", ".join(describe(path) for path in paths)
