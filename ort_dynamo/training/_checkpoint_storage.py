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
        save_obj: dictionaries, at most 64 in one another, of NumPy arrays (booleans, integers, floats down to 8 bits,
            complex numbers), tensors (loaded as arrays), NumPy's and Python's numbers, text and bytes. A list or tuple
            of numbers is saved and loaded as an array. Keys are any text.
        path: where to; the file is there whole or not at all. Or a binary file object: it has to be empty, and is
            written from its start.

    Raises:
        FileExistsError: there is something at the path already.
        OSError: the file cannot be written.
        TypeError: a key or a value cannot be saved; it is named.
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
    """Load a saved dictionary, or the part of it that a key names.

    Nothing but the file is read, nothing in it is run, and no more memory is taken than its size calls for.

    Args:
        path: a path, or a binary file object that can seek; it is read from its start.
        key: keys from the outermost dictionary on, joined by "/": "a/c" is `loaded["a"]["c"]`. A key that has a "/"
            itself cannot be named so.

    Returns:
        The value given to `save`, of the same types. A file of onnxruntime.training's does not tell its arrays without
        dimensions and Python's numbers apart: both are NumPy scalars.

    Raises:
        CheckpointFileError: the file is damaged, or no checkpoint, or has content that no checkpoint has; also a
            ValueError.
        KeyError: there is nothing under that key.
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
