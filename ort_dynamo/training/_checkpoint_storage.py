"""Saves nested dictionaries as HDF5 files and loads them, those of onnxruntime.training among them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import IO, Any

from ort_dynamo.errors import CheckpointFileError, MissingDependencyError
from ort_dynamo.training.checkpointing.sealed_file import SEAL_SIZE, PathOrFile, describe, open_checked, write_sealed
from ort_dynamo.training.checkpointing.tree_reader import NoSuchKeyError, TreeReader
from ort_dynamo.training.checkpointing.tree_writer import write_tree

__all__ = ["is_sealed", "load", "save"]


def save(save_obj: Mapping[str, Any], path: PathOrFile) -> None:
    """Save a dictionary as a new file.

    Args:
        save_obj: dictionaries, nested at most 64 levels, of NumPy arrays (booleans, integers, floats of 8 bits or more,
            complex numbers), tensors (loaded as arrays), NumPy and Python scalars, text and bytes. A list or tuple of
            scalars is saved and loaded as an array. Keys are any text.
        path: the path of a new file, which is written completely or not at all. Or an empty binary file object, which
            is written from its start.

    Raises:
        FileExistsError: the path exists.
        OSError: the file cannot be written.
        TypeError: a key or a value cannot be saved; the message names it.
        ValueError: `save_obj` is no dictionary, or nested too deeply.
    """
    if not isinstance(save_obj, Mapping):
        raise ValueError("Object to be saved must be a dictionary")
    h5py = _h5py()

    def write(file: IO[bytes]) -> None:
        with h5py.File(file, "w", userblock_size=SEAL_SIZE) as content:
            write_tree(content, save_obj)

    write_sealed(path, write)


def load(path: PathOrFile, key: str | None = None) -> Any:
    """Load a saved dictionary, or the part under a key.

    It reads only the file, runs nothing in it, and takes memory in proportion to its size.

    Args:
        path: a path, or a binary file object that can seek; it is read from its start.
        key: keys from the outermost dictionary on, joined by "/": "a/c" is `loaded["a"]["c"]`. A key that contains "/"
            cannot be given.

    Returns:
        The value given to `save`, with the same types. A file of onnxruntime.training does not distinguish 0-d arrays
        from Python scalars: both are loaded as NumPy scalars.

    Raises:
        CheckpointFileError: the file is damaged, or no checkpoint, or has content that no checkpoint has; also a
            ValueError.
        KeyError: the key does not exist.
        OSError: the file cannot be opened.
    """
    h5py = _h5py()
    keys = tuple(part for part in (key or "").split("/") if part)
    with open_checked(path) as (file, ours):
        size = file.seek(0, os.SEEK_END)
        try:
            with h5py.File(file, "r") as content:
                return TreeReader(h5py, content, file, size, describe(path), ours).read(keys)
        except (CheckpointFileError, NoSuchKeyError, MemoryError):
            raise
        except Exception as error:
            # h5py raises many types for files that HDF5 cannot read: OSError, RuntimeError, ValueError, KeyError,
            # TypeError.
            raise CheckpointFileError(path=describe(path), reason=f"HDF5 cannot read it: {error}") from error


def is_sealed(path: PathOrFile) -> bool:
    """Check whether a file was written by `save`, not by onnxruntime.training; raises as `load` does."""
    with open_checked(path) as (_, ours):
        return ours


def _h5py() -> Any:
    try:
        return importlib.import_module("h5py")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(what="A checkpoint file", package="h5py") from error
