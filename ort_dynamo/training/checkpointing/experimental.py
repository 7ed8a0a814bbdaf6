"""The four functions that were checkpoints before `ORTTrainer.save_checkpoint`: flat dictionaries, by torch.save."""

from __future__ import annotations

import os
import pickle
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ort_dynamo.errors import CheckpointFileError
from ort_dynamo.training.checkpointing.flat_states import flatten, join, unflatten

__all__ = [
    "experimental_load_checkpoint",
    "experimental_load_state_dict",
    "experimental_save_checkpoint",
    "experimental_state_dict",
    "load_from_folder",
    "save_into_folder",
]


def experimental_state_dict(ort_trainer: Any, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
    """Give a trainer's states as a flat dictionary of tensors.

    Args:
        ort_trainer: an ORTTrainer.
        include_optimizer_state: False for the weights alone.

    Returns:
        {name: tensor} on the CPU; {} before the first step.

    Raises:
        ValueError: a weight has the name that another one's optimizer state has.
    """
    _deprecate("experimental_state_dict", "state_dict")
    return flatten(ort_trainer.state_dict(), include_optimizer_state)


def experimental_load_state_dict(
    ort_trainer: Any, state_dict: Mapping[str, torch.Tensor], strict: bool = False
) -> None:
    """Load a dictionary of `experimental_state_dict` into a trainer, now or at its first step.

    Args:
        ort_trainer: an ORTTrainer.
        state_dict: {name: tensor}.
        strict: whether each name of the trainer's has to be there, and no other.
    """
    _deprecate("experimental_load_state_dict", "load_state_dict")
    ort_trainer.load_state_dict(unflatten(state_dict, {}), strict=strict)


def experimental_save_checkpoint(
    ort_trainer: Any,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Save a trainer's states and the user's dictionary into a folder, by torch.save.

    The file is "PREFIX.ort.pt"; with ZeRO, each rank's is "PREFIX.ZeRO.RANK.LAST_RANK.ort.pt". A file that is there is
    replaced, whole.

    Args:
        ort_trainer: an ORTTrainer.
        checkpoint_dir: the folder, which has to exist.
        checkpoint_prefix: the beginning of the file's name.
        checkpoint_state_dict: the value that `experimental_load_checkpoint` shall return: tensors and plain values.
        include_optimizer_state: False for the weights alone.

    Raises:
        AssertionError: there is no such folder.
        OSError: the file cannot be written.
        TypeError: `checkpoint_state_dict` has a value that torch.load does not load without running code.
    """
    _deprecate("experimental_save_checkpoint", "save_checkpoint")
    save_into_folder(ort_trainer, checkpoint_dir, checkpoint_prefix, checkpoint_state_dict, include_optimizer_state)


def save_into_folder(
    ort_trainer: Any,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str,
    checkpoint_state_dict: Mapping[str, Any] | None,
    include_optimizer_state: bool,
) -> None:
    """Save as `experimental_save_checkpoint` does, without its warning."""
    assert os.path.exists(checkpoint_dir), f"checkpoint_dir ({checkpoint_dir}) directory doesn't exist"
    state = ort_trainer.state_dict()
    content = {**(checkpoint_state_dict or {}), "model": flatten(state, include_optimizer_state)}
    if state.get("partition_info"):
        shapes = {name: np.asarray(info["original_dim"]).tolist() for name, info in state["partition_info"].items()}
        content["partition_info"] = shapes
    options = ort_trainer.options.distributed
    path = Path(checkpoint_dir) / _file_name(
        checkpoint_prefix, options.deepspeed_zero_optimization.stage, options.world_rank, options.world_size
    )
    if path.exists():
        warnings.warn(f"{path} already exists, overwriting.", stacklevel=3)
    _save(content, path)


def experimental_load_checkpoint(
    ort_trainer: Any,
    checkpoint_dir: str | os.PathLike[str],
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint of `experimental_save_checkpoint`; with ZeRO the rank's own file, otherwise all files.

    Args:
        ort_trainer: an ORTTrainer.
        checkpoint_dir: the folder.
        checkpoint_prefix: the beginning of the files' names.
        strict: as for `experimental_load_state_dict`.

    Returns:
        The dictionary saved as `checkpoint_state_dict`; of several ranks, the last one's value of each key.

    Raises:
        AssertionError: a file is missing, or states that should be equal are not.
        CheckpointFileError: a file is damaged, or holds a value that cannot be loaded without running code.
    """
    _deprecate("experimental_load_checkpoint", "load_checkpoint")
    return load_from_folder(ort_trainer, checkpoint_dir, checkpoint_prefix, strict)


def load_from_folder(
    ort_trainer: Any, checkpoint_dir: str | os.PathLike[str], checkpoint_prefix: str, strict: bool
) -> dict[str, Any]:
    """Load as `experimental_load_checkpoint` does, without its warning."""
    found = _list_files(Path(checkpoint_dir), checkpoint_prefix)
    options = ort_trainer.options.distributed
    split = len(found) > 1
    if split:
        warnings.warn(
            f"Found more than one file with prefix {checkpoint_prefix} in directory {checkpoint_dir}."
            " Attempting to load ZeRO checkpoint.",
            stacklevel=3,
        )
    if split and not options.deepspeed_zero_optimization.stage:
        loaded = _load_all(Path(checkpoint_dir), checkpoint_prefix, len(found))
    else:
        name = _file_name(checkpoint_prefix, split, options.world_rank, options.world_size)
        path = Path(checkpoint_dir) / name
        why = (
            " Optimizer partitioning is enabled using ZeRO. Please make sure the checkpoint file exists "
            f"for rank {options.world_rank} of {options.world_size}"
        )
        assert path.exists(), f"Couldn't find checkpoint file {path}.{why if split else ''}"
        loaded = _load(path)
    partitions = loaded.pop("partition_info", {})
    ort_trainer.load_state_dict(unflatten(loaded.pop("model"), partitions), strict=strict)
    return loaded


def _deprecate(name: str, instead: str) -> None:
    warnings.warn(
        f"{name}() will be deprecated soon. Please use ORTTrainer.{instead}() instead.",
        DeprecationWarning,
        stacklevel=3,
    )


def _file_name(prefix: str, split: bool | int, rank: int, world_size: int) -> str:
    return f"{prefix}.ZeRO.{rank}.{world_size - 1}.ort.pt" if split else f"{prefix}.ort.pt"


def _list_files(folder: Path, prefix: str) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.name.startswith(prefix) and path.name.endswith(".ort.pt"))
    assert found, f"No checkpoint found with prefix '{prefix}' at '{folder}'"
    return found


def _load_all(folder: Path, prefix: str, count: int) -> dict[str, Any]:
    paths = [folder / _file_name(prefix, True, rank, count) for rank in range(count)]
    assert all(path.exists() for path in paths), f"Could not find {count} files"
    ranks = [_load(path) for path in paths]
    content: dict[str, Any] = {}
    for loaded in ranks:
        content.update(loaded)
    content["model"] = join([loaded["model"] for loaded in ranks], content.pop("partition_info", {}))
    return content


def _save(content: Mapping[str, Any], path: Path) -> None:
    temporary = path.with_name(f".ort_checkpoint.{os.getpid()}-{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(temporary, "xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise TypeError(
                "checkpoint_state_dict has a value that torch.load does not load without running code; "
                f"it may hold tensors and plain values: {str(error).splitlines()[0]}"
            ) from error
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # torch raises many types for a file that it cannot read: RuntimeError, UnpicklingError, EOFError, KeyError.
        reason = f"torch.load cannot read it without running code: {error}"
        raise CheckpointFileError(path=str(path), reason=reason) from error
    model = loaded.get("model") if isinstance(loaded, dict) else None
    if not isinstance(model, dict) or not all(isinstance(value, torch.Tensor) for value in model.values()):
        raise CheckpointFileError(path=str(path), reason="it has no 'model' of tensors")
    if not isinstance(loaded.get("partition_info", {}), dict):
        raise CheckpointFileError(path=str(path), reason="its 'partition_info' is not a dictionary")
    return loaded
