"""On-disk cache of compiled islands.

The key is the graph key with all that the bytes depend on beside it: the code of this package, Python, the build of
ONNX Runtime, and the instruction set that its optimizers look at. Nothing here can fail a compile, except a folder that
an option names and nobody can make: an unreadable entry is a miss, an entry that cannot be written is not stored, and
each reason is logged once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ort_dynamo.cache.entry import Entry, EntryError, pack, read_entry
from ort_dynamo.cache.folder import CacheFolder, FolderRefusedError
from ort_dynamo.cache.source_code import source_digest
from ort_dynamo.errors import SessionError, UnwritableFolderError
from ort_dynamo.graph.build import BuildSpec, BuiltGraph
from ort_dynamo.graph.graph_key import GraphKey
from ort_dynamo.options.cache_location import CacheLocation, NoHomeError, cache_location, traces_are_cached
from ort_dynamo.options.groups import CacheOptions
from ort_dynamo.torch_internals.artifacts import record_artifact, register_artifacts

__all__ = [
    "COUNTS",
    "DiskCache",
    "Miss",
    "context_key",
    "disk_cache",
    "disk_key",
    "keeps_traces",
    "make_named_folder",
    "say_once",
    "say_unusable",
    "stored_place",
    "write_if_possible",
]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

COUNTS: Counter[str] = Counter()
"""Lookups of this process: "hit", or the reason of a miss -> how often."""


@dataclass(frozen=True)
class Miss:
    """Nothing was found.

    Attributes:
        reason: "absent"; "damaged": there is something, but no entry that fits; "refused": folder or file are not to be
            trusted; "unreadable": the system does not let it be read.
    """

    reason: str


def disk_key(key: GraphKey, facts: Iterable[str]) -> str:
    """SHA-256, as hex, of a graph key and of all else that the stored bytes depend on.

    Args:
        key: the island's.
        facts: the runtime's description of its build and of the machine.
    """
    return context_key([key.digest], facts)


def context_key(lines: Iterable[str], facts: Iterable[str]) -> str:
    """SHA-256, as hex, of some lines, the sources of this package, Python, and the runtime's facts about its build."""
    python = f"{sys.implementation.cache_tag} {platform.system()} {platform.machine()}"
    return hashlib.sha256("\n".join([*lines, source_digest(), python, *facts]).encode()).hexdigest()


def disk_cache(options: CacheOptions) -> DiskCache | None:
    """Return the folder that options and environment ask for; None where nothing is stored.

    Raises:
        InvalidVariableError: an environment variable of the cache has a value that it cannot take.
    """
    place = stored_place(options)
    return None if place is None else DiskCache(CacheFolder(place.path, place.max_bytes))


def stored_place(options: CacheOptions) -> CacheLocation | None:
    """Return the folder and its maximum size; None where nothing is stored, with a warning if there is no home for it.

    Raises as `disk_cache`.
    """
    try:
        return cache_location(options.disk_cache, options.cache_dir)
    except NoHomeError as error:
        say_once(f"Compiled graphs are not stored. {error}")
        return None


def make_named_folder(options: CacheOptions) -> None:
    """Make the folder that the option `cache` names, if it is missing: that it cannot be made is the program's mistake.

    Raises:
        UnwritableFolderError: the folder cannot be made.
    """
    if options.cache_dir is None:
        return
    try:
        place = cache_location(options.disk_cache, options.cache_dir)
        if place is not None:
            place.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (NoHomeError, OSError) as error:
        raise UnwritableFolderError(name="cache", value=options.cache_dir, error=error) from error


def keeps_traces(options: CacheOptions) -> bool | None:
    """Check whether torch stores AOTAutograd's results, too; torch unpickles them when it reads them.

    None leaves the decision to the gain. Raises as `disk_cache`.
    """
    return stored_place(options) is not None and traces_are_cached(options.trace_cache)


class DiskCache:
    """Built islands in a folder.

    Args:
        folder: where.
    """

    def __init__(self, folder: CacheFolder) -> None:
        self._folder = folder

    @property
    def kernels(self) -> CacheFolder:
        """The folder in this one that holds compiled kernels."""
        return self._folder.kernels()

    def load(self, key: str, name: str, spec: BuildSpec, opened: Callable[[BuiltGraph], _T]) -> _T | Miss:
        """Open the entry of a key.

        Args:
            key: from `disk_key`.
            name: the name of the graph in errors and files.
            spec: everything that decided how it was built.
            opened: opens it; where that raises SessionError, there is nothing.
        """
        found = self._load(key, lambda entry: opened(entry.built(name, spec.session, in_order=spec.in_order)))
        COUNTS[found.reason if isinstance(found, Miss) else "hit"] += 1
        return found

    def load_entry(self, key: str) -> Entry | Miss:
        """Give the entry of a key, built with any options; a miss is not counted, for `load` comes after it."""
        found = self._load(key, lambda entry: entry)
        COUNTS["hit"] += isinstance(found, Entry)
        return found

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Lock a key across processes while looking it up or building it."""
        with ExitStack() as stack:
            try:
                if not self._folder.holds(key):
                    stack.enter_context(self._folder.build_lock(key))
            except (FolderRefusedError, OSError) as error:
                # Later reads and writes of the folder report errors; here the graph is only built twice.
                _log.info(
                    "ort_train: %s: no lock, several processes may compile %s: %s", self._folder.path, key[:16], error
                )
            yield

    def holds(self, key: str) -> bool:
        """Check whether there is an entry of a key, as far as its name goes."""
        return self._folder.holds(key)

    def _load(self, key: str, read: Callable[[Entry], _T]) -> _T | Miss:
        try:
            data = self._folder.read(key)
            if data is None:
                return Miss("absent")
            found = read(read_entry(data, key))
            record_artifact(_KIND, key, data)
            return found
        except (EntryError, SessionError) as error:
            say_once(f"{self._folder.path}: {key[:16]} cannot be used: {error}. The graph is compiled again.")
            return Miss("damaged")
        except (FolderRefusedError, OSError) as error:
            say_unusable(_CONTENT, "read", error)
            return Miss("refused" if isinstance(error, FolderRefusedError) else "unreadable")

    def store(self, key: str, built: BuiltGraph) -> None:
        """Store a built graph, if the folder takes it."""
        if built.keyable:
            data = pack(built, key)
            record_artifact(_KIND, key, data)
            write_if_possible(self._folder, key, data, _CONTENT)

    def add(self, key: str, data: bytes) -> None:
        """Store an entry that comes from elsewhere, if it is one."""
        try:
            if not re.fullmatch("[0-9a-f]{64}", key):
                raise EntryError("its key is not a SHA-256 hash")
            read_entry(data, key)
        except EntryError as error:
            say_once(f"The cache artifact {key[:80]!r} is ignored: {error}.")
        else:
            write_if_possible(self._folder, key, data, _CONTENT)


_CONTENT = "compiled graphs"


def write_if_possible(folder: CacheFolder, key: str, data: bytes, content: str) -> None:
    """Write a file of the cache of `content`; if the folder does not take it, log the reason once."""
    try:
        folder.write(key, data)
    except (FolderRefusedError, OSError) as error:
        say_unusable(content, "written", error)


def _load_artifact(key: str, data: bytes) -> None:
    """Put the artifacts of `torch.compiler.load_cache_artifacts` into the folder from the environment variable."""
    stored = disk_cache(CacheOptions())
    if stored is not None:
        stored.add(key, data)


_KIND = "ort_dynamo"
register_artifacts(_KIND, _load_artifact)

_said: dict[Hashable, object] = {}


def say_once(text: str, reason: Hashable = None) -> None:
    """Log a warning, the first time that this process has it.

    Args:
        text: the warning.
        reason: what makes two warnings the same one; None takes the text.
    """
    this = object()
    if _said.setdefault(reason or text, this) is this:  # one step, which needs no lock
        _log.warning("ort_train: %s", text)


def say_unusable(content: str, use: str, error: Exception) -> None:
    """Log once that the cache of `content` cannot be "read" or "written", and how to go on."""
    fault = f"The cache of {content} {'is not' if isinstance(error, FolderRefusedError) else 'cannot be'} {use}"
    advice = "The run goes on without it. Set options={'cache': FOLDER} or ORT_DYNAMO_CACHE_DIR to another folder."
    reason: Hashable = None
    if isinstance(error, OSError):  # it names the file, and each entry has another
        reason = fault, error.errno, os.path.dirname(error.filename or "")
    say_once(f"{fault}: {error}. {advice}", reason)
