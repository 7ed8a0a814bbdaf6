"""Reads a dictionary from HDF5 that may come from anywhere: only plain values that the file itself holds.

Each link, type and layout is looked at before it is followed or read. Old checkpoints consist of hard links, groups and
contiguous datasets of numbers, booleans and single texts; anything else that HDF5 knows can lead to other files,
plugins, endless walks or allocations beyond the size of the file, and is refused.
"""

from __future__ import annotations

import math
from typing import IO, Any

import numpy as np

from ort_dynamo.errors import CheckpointFileError
from ort_dynamo.training.checkpointing.array_types import NATIVE, dtype_stored_as_bytes
from ort_dynamo.training.checkpointing.heap_text import read_heap_text
from ort_dynamo.training.checkpointing.key_names import key_of, name_of
from ort_dynamo.training.checkpointing.tree_writer import DEEPEST

__all__ = ["NoSuchKeyError", "TreeReader"]

_LONGEST_KIND = 32


class NoSuchKeyError(KeyError):
    """A file has nothing under the key that was asked for."""


class TreeReader:
    """Reads from one open h5py.File.

    Args:
        h5py: the module.
        file: an h5py.File.
        raw: the file that it reads.
        size: bytes of the file; no more than so many are read in all.
        path: the file's name in an error.
        ours: whether the names of its links are escaped and its datasets marked, as `tree_writer` does.
    """

    def __init__(self, h5py: Any, file: Any, raw: IO[bytes], size: int, path: str, ours: bool) -> None:
        self._h5py = h5py
        self._file = file
        self._raw = raw
        self._size = size
        self._left = size
        self._path = path
        self._ours = ours
        self._seen: set[int] = set()

    def read(self, keys: tuple[str, ...] = ()) -> Any:
        """Read the value that the keys lead to, from the outermost dictionary on; without keys, the whole dictionary.

        Raises:
            CheckpointFileError: something on the way is of a kind that no checkpoint has.
            NoSuchKeyError: nothing is there.
        """
        place = self._h5py.h5g.open(self._file.id, b"/")
        self._visit(place, "/")
        where = ""
        for key in keys:
            name = (name_of(key) if self._ours else key).encode()
            if not isinstance(place, self._h5py.h5g.GroupID) or name in (b"", b".") or name not in place:
                raise NoSuchKeyError("/".join(keys))
            where = f"{where}/{key}"
            place = self._open(place, name, where)
        return self._read(place, where or "/", 0)

    def _refuse(self, where: str, reason: str) -> CheckpointFileError:
        return CheckpointFileError(path=self._path, reason=f"{where} is {reason}, which no checkpoint has")

    def _open(self, group: Any, name: bytes, where: str) -> Any:
        if group.links.get_info(name).type != self._h5py.h5l.TYPE_HARD:
            raise self._refuse(where, "a link to another place or file")
        found = self._h5py.h5o.open(group, name)
        self._visit(found, where)
        return found

    def _visit(self, found: Any, where: str) -> None:
        address = self._h5py.h5o.get_info(found).addr
        if address in self._seen:
            raise self._refuse(where, "a second name of something that was already read")
        self._seen.add(address)

    def _read(self, found: Any, where: str, depth: int) -> Any:
        if isinstance(found, self._h5py.h5g.GroupID):
            return self._read_group(found, where, depth)
        if isinstance(found, self._h5py.h5d.DatasetID):
            return self._read_dataset(found, where)
        raise self._refuse(where, "neither group nor dataset")

    def _read_group(self, group: Any, where: str, depth: int) -> dict[str, Any]:
        if depth > DEEPEST:
            raise self._refuse(where, f"in more than {DEEPEST} groups")
        tree = {}
        for name in list(group):
            key = key_of(name.decode("utf-8")) if self._ours else name.decode("utf-8")
            inside = f"{where.rstrip('/')}/{key}"
            tree[key] = self._read(self._open(group, name, inside), inside, depth + 1)
        return tree

    def _read_dataset(self, dataset: Any, where: str) -> Any:
        h5py = self._h5py
        # The layout comes first: to ask a virtual dataset for its shape can open the files that it names.
        plan = dataset.get_create_plist()
        if plan.get_layout() != h5py.h5d.CONTIGUOUS or plan.get_external_count() or plan.get_nfilters():
            raise self._refuse(where, "compressed, chunked, virtual or stored in another file")
        space = dataset.get_space()
        if space.get_simple_extent_type() not in (h5py.h5s.SCALAR, h5py.h5s.SIMPLE):
            raise self._refuse(where, "without a shape")
        stored = dataset.get_type()
        if stored.get_class() == h5py.h5t.STRING:
            return self._read_text(dataset, stored, space, where)
        dtype = self._dtype(stored, where)
        size = math.prod(space.get_simple_extent_dims()) * dtype.itemsize
        offset = dataset.get_offset()
        if size and (offset is None or offset + size > self._size):
            raise self._refuse(where, f"{size} bytes of which the file does not have all")
        self._spend(size, where)
        value = h5py.Dataset(dataset)[()]
        if dtype.name == "bool" and size and np.asarray(value).view(np.uint8).max() > 1:
            raise self._refuse(where, "a boolean that is neither true nor false")
        if not dtype.isnative:
            value = value.astype(dtype.newbyteorder("="))
        return self._unmark(value, self._kind(dataset, where), where)

    def _spend(self, size: int, where: str) -> None:
        """Count bytes, so that datasets which share their bytes in the file cannot add up to more than the file has."""
        self._left -= size
        if self._left < 0:
            raise self._refuse(where, "more than the file can hold")

    def _dtype(self, stored: Any, where: str) -> np.dtype[Any]:
        h5t = self._h5py.h5t
        if stored.get_class() not in (h5t.INTEGER, h5t.FLOAT, h5t.ENUM):
            raise self._refuse(where, "of a type other than number, boolean and text")
        dtype: np.dtype[Any] = stored.dtype
        if dtype.name not in NATIVE or dtype.itemsize != stored.get_size():
            raise self._refuse(where, f"of the type {dtype}")
        if (stored.get_class() == h5t.ENUM) != (dtype.name == "bool"):
            raise self._refuse(where, "an enumeration")
        return dtype

    def _read_text(self, dataset: Any, stored: Any, space: Any, where: str) -> Any:
        if math.prod(space.get_simple_extent_dims()) != 1 or space.get_simple_extent_ndims():
            raise self._refuse(where, "an array of texts")
        if stored.is_variable_str():
            content = self._read_variable_text(dataset, where)
            self._spend(len(content), where)
        else:
            self._spend(stored.get_size(), where)
            content = bytes(self._h5py.Dataset(dataset)[()])
        text = content.decode("utf-8")
        if self._kind(dataset, where) == "int":
            return int(text, 16)
        return text

    def _read_variable_text(self, dataset: Any, where: str) -> bytes:
        plan, offset = self._file.id.get_create_plist(), dataset.get_offset()
        if plan.get_sizes() != (8, 8) or offset is None:
            raise self._refuse(where, "a text without a place in the file")
        return read_heap_text(self._raw, offset, plan.get_userblock(), self._size)

    def _kind(self, dataset: Any, where: str) -> str:
        h5a = self._h5py.h5a
        if not self._ours or not h5a.exists(dataset, b"kind"):
            return ""
        attribute = h5a.open(dataset, b"kind")
        stored = attribute.get_type()
        text = stored.get_class() == self._h5py.h5t.STRING and not stored.is_variable_str()
        if not text or stored.get_size() > _LONGEST_KIND or attribute.shape != ():
            raise self._refuse(where, "marked as no known kind")
        content = np.empty((), f"S{stored.get_size()}")
        attribute.read(content)
        return bytes(content.item()).decode("ascii")

    def _unmark(self, value: Any, kind: str, where: str) -> Any:
        array = np.asarray(value)
        if kind in ("int", "float", "bool") and array.ndim == 0:
            return {"int": int, "float": float, "bool": bool}[kind](value)
        if kind == "array" and array.ndim == 0:
            return array
        if kind in ("str", "bytes") and array.dtype == np.uint8 and array.ndim == 1:
            content = array.tobytes()
            return content if kind == "bytes" else content.decode("utf-8", "surrogatepass")
        if kind in ("int", "float", "bool", "array", "str", "bytes"):
            raise self._refuse(where, f"marked {kind!r} and something else")
        if not kind:
            return value
        dtype = dtype_stored_as_bytes(kind)
        if array.dtype != np.uint8 or array.ndim == 0 or array.shape[-1] != dtype.itemsize:
            raise self._refuse(where, f"marked {kind!r} and something else")
        return array.reshape(-1).view(dtype).reshape(array.shape[:-1])
