"""python -m ort_dynamo cache: the on-disk cache of compiled graphs."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ort_dynamo.commands.script import add_program, check_program, given_program, run_script
from ort_dynamo.explanation.units import spelled_bytes

if TYPE_CHECKING:
    from ort_dynamo.cache.entry import Entry
    from ort_dynamo.cache.folder import CacheFolder, StoredEntry

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "Show, verify, clear or fill the on-disk cache of compiled graphs."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    said = "the cache folder (default: the one that compiles use); before or after the action"
    parser.add_argument("--dir", metavar="DIR", type=_folder, help=said)
    folder = argparse.ArgumentParser(add_help=False)
    # The default keeps one that stands before the action.
    folder.add_argument("--dir", metavar="DIR", type=_folder, default=argparse.SUPPRESS, help=said)
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    actions.add_parser("info", parents=[folder], help="print the folder, its size and the number of entries")
    actions.add_parser("list", parents=[folder], help="list the entries, the most recently used first")
    verify = actions.add_parser(
        "verify", parents=[folder], help="read every entry; the exit status is 1 if one is damaged"
    )
    verify.add_argument("--remove", action="store_true", help="remove damaged entries")
    clear = actions.add_parser("clear", parents=[folder], help="remove all entries, or only old ones")
    clear.add_argument(
        "--older-than",
        type=_days,
        default=0.0,
        metavar="DAYS",
        help="remove only entries that nothing has used for this many days",
    )
    said = "fill the cache: run a program, and print its cache hits and misses"
    warm = actions.add_parser("warm", parents=[folder], epilog=_BEHIND, help=said)
    add_program(warm, "the program to run, and its own arguments")


_BEHIND = "Give --dir before the program: all that comes after script.py is the program's."


def run(arguments: argparse.Namespace) -> int:
    """Do one of the actions.

    Returns:
        0. `verify` returns 1 if an entry is damaged; `warm` returns the program's own status.

    Raises:
        CacheRefusedError: other users can write to the folder, or the system refuses to read or change it.
        CacheOffError: `warm` while ORT_DYNAMO_CACHE is 0.
        ProgramFileError: `warm` of a program that is missing or cannot be read.
        InvalidVariableError: an environment variable of the cache has an invalid value.
    """
    from ort_dynamo.cache.folder import CacheFolder, FolderRefusedError
    from ort_dynamo.errors import CacheRefusedError
    from ort_dynamo.options.cache_location import cache_location

    place = cache_location(True, arguments.dir)
    assert place is not None
    folder = CacheFolder(place.path, place.max_bytes)
    try:
        match arguments.action:
            case "info":
                return _info(folder)
            case "list":
                return _list(folder)
            case "verify":
                return _verify(folder, remove=arguments.remove)
            case "clear":
                unused = arguments.older_than * 24 * 3600
                print(f"{folder.clear(unused) + folder.kernels().clear(unused)} files removed from {folder.path}")
                return 0
        folder.entries()  # refuses a folder that the program would not use
        return _warm(folder, *given_program(arguments))
    except FolderRefusedError as error:
        raise CacheRefusedError(reason=str(error)) from error
    except OSError as error:
        if error.filename is None:  # an error of the output
            raise
        raise CacheRefusedError(reason=str(error)) from error


def _folder(text: str) -> str:
    """Refuse an empty name, such as that of an unset variable of a shell: it would be the default folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    return text


def _days(text: str) -> float:
    days = float(text)
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days")
    return days


_days.__name__ = "number of days"  # in argparse's message about a text that is not a number


def _info(folder: CacheFolder) -> int:
    from ort_dynamo.options.cache_location import cache_location

    entries = folder.entries()
    kernels = folder.kernels().entries()
    print(f"folder   {folder.path}{'' if folder.path.is_dir() else ' (not there yet)'}")
    print(f"in use   {'yes' if cache_location() is not None else 'no: ORT_DYNAMO_CACHE is 0'}")
    print(f"entries  {len(entries)}")
    print(f"size     {spelled_bytes(sum(one.nbytes for one in entries))} of {spelled_bytes(folder.max_bytes)}")
    print(f"kernels  {len(kernels)}, {spelled_bytes(sum(one.nbytes for one in kernels))}")
    return 0


def _list(folder: CacheFolder) -> int:
    for stored in sorted(folder.entries(), key=lambda one: -one.used):
        entry = _read(folder, stored)
        said = entry if isinstance(entry, str) else f"{entry.record.nodes:5} nodes  {entry.name}"
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(stored.used))
        print(f"{stored.key[:16]}  {spelled_bytes(stored.nbytes):>9}  {used}  {said}")
    return 0


def _verify(folder: CacheFolder, *, remove: bool) -> int:
    entries = folder.entries()
    damaged = 0
    for stored in entries:
        entry = _read(folder, stored)
        if isinstance(entry, str):
            damaged += 1
            print(f"{stored.path}: {entry}")
            if remove:
                stored.path.unlink(missing_ok=True)
    print(f"{len(entries)} entries, {damaged} damaged{' and removed' if remove and damaged else ''}")
    return int(damaged > 0)


def _read(folder: CacheFolder, stored: StoredEntry) -> Entry | str:
    """Return the entry, or its fault."""
    from ort_dynamo.cache.entry import EntryError, read_entry
    from ort_dynamo.cache.folder import FolderRefusedError

    used = stored.used
    try:
        data = folder.read(stored.key)
        return "it is gone" if data is None else read_entry(data, stored.key)
    except (EntryError, FolderRefusedError, OSError) as error:
        return str(error)
    finally:
        with contextlib.suppress(OSError):  # it is gone, or the folder can only be read, which keeps the times
            os.utime(stored.path, (used, used))  # reading an entry here is not a use


def _warm(folder: CacheFolder, script: Path, arguments: list[str]) -> int:
    import torch

    from ort_dynamo.cache.disk import COUNTS
    from ort_dynamo.errors import CacheOffError
    from ort_dynamo.options.cache_location import DIRECTORY, SWITCH, cache_location
    from ort_dynamo.torch_internals.aot_cache import precompiles

    if cache_location() is None:
        raise CacheOffError(name=SWITCH)
    check_program(script)
    os.environ[DIRECTORY] = str(folder.path)
    status = run_script(script, arguments)
    if precompiles():
        torch.compiler.save_cache_artifacts()  # Dynamo does not save its results by itself
    misses = sum(COUNTS.values()) - COUNTS["hit"]
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(COUNTS.items()) if reason != "hit")
    print(f"{COUNTS['hit']} graphs read from {folder.path}, {misses} built{f' ({reasons})' if misses else ''}")
    return status
