"""Compiled kernels in a folder below the cache of compiled graphs, by the same rules of who may have written them.

A kernel is code of a device. A folder or a file that another user could have written is not read, and a kernel that
cannot be read or stored is compiled when it is wanted. Each reason is logged once.
"""

from __future__ import annotations

from pathlib import Path

from ort_dynamo.cache.disk import DiskCache, say_unusable, write_if_possible
from ort_dynamo.cache.folder import CacheFolder, FolderRefusedError

__all__ = ["KernelFiles", "kernel_files"]

_CONTENT = "compiled kernels"


class KernelFiles:
    """Stores compiled kernels by key, as the runtime's `KernelStore`; nothing here raises.

    Args:
        folder: from `CacheFolder.kernels`.
    """

    def __init__(self, folder: CacheFolder) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        """The folder that holds the kernels."""
        return self._folder.path

    def load(self, key: str) -> bytes | None:
        """Return the bytes of a key, if the folder has them and is to be trusted."""
        try:
            return self._folder.read(key)
        except (FolderRefusedError, OSError) as error:
            say_unusable(_CONTENT, "read", error)
        return None

    def store(self, key: str, data: bytes) -> None:
        """Store bytes, if the folder takes them."""
        write_if_possible(self._folder, key, data, _CONTENT)


def kernel_files(cache: DiskCache | None) -> KernelFiles | None:
    """Give the store of the kernels of a cache's graphs; None where there is no cache."""
    return None if cache is None else KernelFiles(cache.kernels)
