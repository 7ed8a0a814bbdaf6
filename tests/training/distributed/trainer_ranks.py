"""Runs a function in several processes that torchrun's variables make a group of, and never waits longer than told.

The test's process hosts the store, as torchrun's agent does, so that no port is guessed. The processes are programs of
their own: a trainer makes the group itself, from the variables.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed

__all__ = ["Left", "run_ranks", "start_ranks"]


@dataclass(frozen=True)
class Left:
    """What a rank left.

    Attributes:
        value: what its function returned; None where it raised.
        error: its traceback and what it said; "" where it returned.
    """

    value: Any
    error: str


def run_ranks(folder: Path, world: int, function: Callable[..., Any], *args: Any, timeout: float = 150) -> list[Any]:
    """Call `function(rank, world, *args)` in each rank, and give what they return, by rank.

    Raises:
        AssertionError: a rank did not return; the message has what each of them left.
    """
    found = start_ranks(folder, world, function, *args, timeout=timeout)
    told = [f"--- rank {rank}:\n{one.error[-4000:]}" for rank, one in enumerate(found) if one.error]
    assert not told, "\n".join(told)
    return [one.value for one in found]


def start_ranks(
    folder: Path,
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 150,
    environment: Mapping[str, str] | None = None,
) -> list[Left]:
    """Do what `run_ranks` does, and give what each rank left, whatever it was."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "args").write_bytes(pickle.dumps(args))
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **(environment or {}),
    }
    command = [sys.executable, __file__, function.__module__, function.__qualname__, str(folder), str(timeout)]
    processes = []
    deadline = time.monotonic() + timeout
    try:
        for rank in range(world):
            with open(folder / f"said-{rank}", "wb") as said:
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=own, stdout=said, stderr=said))
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()  # the others have had as long, and are looked at next
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_left(folder, rank, process.returncode) for rank, process in enumerate(processes)]


def _left(folder: Path, rank: int, code: int) -> Left:
    value = folder / f"value-{rank}"
    if code == 0 and value.exists():
        return Left(pickle.loads(value.read_bytes()), "")
    return Left(None, f"ended with {code}\n{(folder / f'said-{rank}').read_text(errors='replace')}")


def _main(module: str, name: str, folder: str, timeout: str) -> None:
    """Be one rank."""
    faulthandler.dump_traceback_later(max(float(timeout) - 5, 1), exit=True)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        function = getattr(importlib.import_module(module), name)
        value = function(rank, world, *pickle.loads((Path(folder) / "args").read_bytes()))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without destroying the group: the others shall see that this one is gone
    written = Path(folder) / f"value-{rank}"
    written.with_suffix(".part").write_bytes(pickle.dumps(value))
    written.with_suffix(".part").rename(written)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
