"""Runs a function of a test in several processes that are one process group, and never waits longer than it is told.

The processes are forked by a server that has imported torch and the backend, and nothing else: a rank costs a fork, not
the seconds of these imports. The test's process hosts the store, as torchrun's agent does, so that no port has to be
guessed and the store outlives each rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import ort_dynamo

__all__ = ["RankFailedError", "Ranks", "Result", "compiled_in", "describe", "script"]

PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "ort_dynamo.backend",
    "ort_dynamo.training",
]
_OF_A_DEAD_RANK = 1
_STOPPED = -signal.SIGKILL


class RankFailedError(AssertionError):
    """A rank raised, died or did not end in time; the message has the outcome of each rank."""


@dataclass(frozen=True)
class Result:
    """The outcome of one rank.

    Attributes:
        value: the result of its function; None if it did not return.
        error: its traceback; empty if it returned. A stopped rank has its position.
        printed: its standard output.
        exitcode: the exit code of multiprocessing, negative for a signal.
        seconds: its run time.
    """

    value: Any
    error: str
    printed: str
    exitcode: int | None
    seconds: float


@dataclass
class Ranks:
    """Starts process groups.

    Args:
        folder: for the ranks' files; each launch has a folder of its own in it.
        environment: environment variables of all ranks.
        makes_group: whether ranks are a group when a function of a test is called. Otherwise the function is given its
            rank and how many there are, before the others, and has torchrun's variables to make the group of.
    """

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    makes_group: bool = True
    _launches: int = 0

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout: float = 100.0) -> list[Any]:
        """Call `function(*args)` in each of `world` ranks of a gloo group, and give what they return, by rank.

        Args:
            function: of a module's top level; the ranks import that file.
            world: how many ranks.
            args: pickled into each rank, as are the results.
            timeout: seconds; those that run then are killed, and the error shows where each of them was.

        Raises:
            RankFailedError: not all of them returned.
        """
        results = self.outcomes(function, world, *args, timeout=timeout)
        if any(result.error or result.exitcode for result in results):
            raise RankFailedError(describe(results))
        return [result.value for result in results]

    def outcomes(
        self,
        function: Callable[..., Any],
        world: int,
        *args: Any,
        timeout: float = 100.0,
        environment: Mapping[str, str] | None = None,
        watch: Callable[[Sequence[Any]], None] = lambda processes: None,
    ) -> list[Result]:
        """Do the same as `run`, and give the outcome of each rank, failures included.

        Args:
            function, world, args, timeout: as of `run`.
            environment: more environment variables.
            watch: called with the processes once they are started.
        """
        self._launches += 1
        folder = self.folder / f"launch-{self._launches}"
        folder.mkdir(parents=True)
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
            **self.environment,
            **(environment or {}),
        }
        # The server, and so each rank, has the environment that this process has when the first rank is started.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        place = (function.__code__.co_filename, function.__qualname__)
        processes = [
            context.Process(
                target=_in_rank,
                args=(
                    place,
                    args if self.makes_group else (rank, world, *args),
                    {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    folder,
                    timeout,
                    self.makes_group,
                ),
                daemon=True,
            )
            for rank in range(world)
        ]
        begin = time.monotonic()
        ended: dict[int, float] = {}
        try:
            for process in processes:
                process.start()
            watch(processes)
            while len(ended) < world and (left := begin + timeout - time.monotonic()) > 0:
                ready = wait([p.sentinel for rank, p in enumerate(processes) if rank not in ended], left)
                ended |= {rank: time.monotonic() - begin for rank, p in enumerate(processes) if p.sentinel in ready}
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [_result(folder, rank, p.exitcode, ended.get(rank, timeout)) for rank, p in enumerate(processes)]


def compiled_in(folder: Path) -> dict[str, str]:
    """The variables of ranks that keep compiled graphs in a folder."""
    return {"ORT_DYNAMO_CACHE": "1", "ORT_DYNAMO_CACHE_DIR": str(folder), "ORT_DYNAMO_TRACE_CACHE": "0"}


def describe(results: Sequence[Result]) -> str:
    """Describe the outcomes of ranks; ranks with the same error and exit code share an entry."""
    same: dict[tuple[str, int | None], list[int]] = {}
    for rank, result in enumerate(results):
        same.setdefault((result.error[-3000:], result.exitcode), []).append(rank)
    return "\n".join(f"--- of ranks {ranks}, which ended with {code}:\n{text}" for (text, code), ranks in same.items())


def _result(folder: Path, rank: int, exitcode: int | None, seconds: float) -> Result:
    value, error = folder / f"value-{rank}", folder / f"error-{rank}"
    return Result(
        value=pickle.loads(value.read_bytes()) if value.exists() else None,
        error=error.read_text() if error.exists() else "",
        printed=printed.read_text() if (printed := folder / f"printed-{rank}").exists() else "",
        exitcode=exitcode,
        seconds=seconds,
    )


def _in_rank(
    place: tuple[str, str],
    args: tuple[Any, ...],
    environment: dict[str, str],
    folder: Path,
    timeout: float,
    makes_group: bool,
) -> None:
    """Run one rank: join the group if there is one, call the function, and write its outcome to `folder`."""
    os.environ.update(environment)
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    torch.set_num_threads(1)
    with (
        open(folder / f"error-{rank}", "w", buffering=1) as errors,
        open(folder / f"printed-{rank}", "w", buffering=1) as printed,
        contextlib.redirect_stdout(printed),  # the server's own is that of the test that started it
    ):
        faulthandler.enable(errors)
        faulthandler.dump_traceback_later(max(timeout - 3, 1), file=errors)
        try:
            if place[1] == script.__qualname__:
                value = script(*args)
            else:
                if makes_group:
                    patience = timedelta(seconds=float(environment.get("GROUP_TIMEOUT", 60)))
                    distributed.init_process_group("gloo", rank=rank, world_size=world, timeout=patience)
                torch.manual_seed(0)
                value = _load(*place)(*args)
            (folder / f"value-{rank}.unfinished").write_bytes(pickle.dumps(value))
            os.rename(folder / f"value-{rank}.unfinished", folder / f"value-{rank}")
            if distributed.is_initialized():
                distributed.destroy_process_group()
        except BaseException:
            traceback.print_exc(file=errors)
            errors.flush()
            os._exit(_OF_A_DEAD_RANK)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()


def _load(path: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def script(path: str, *arguments: str) -> ort_dynamo.Summary:
    """Run a script as torchrun runs it, in ranks that have torch imported already, and give the summary."""
    sys.argv = [path, *arguments]
    models = runpy.run_path(path, run_name="__main__")
    summary = ort_dynamo.summary()
    models.clear()  # the summary finds modules that are not traced among the living ones
    return summary
