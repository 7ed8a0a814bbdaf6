"""Processes that compile kernels, each by Triton, which this process does not import.

A process of its own has four reasons. An LLVM that aborts ends it and not the training. The user's settings of
Triton (its interpreter, its dumps, its cache) reach no kernel of ours. Nothing is forked, so no thread of CUDA or of
ONNX Runtime is copied. And unlike multiprocessing's spawn it does not run the user's script again, which may have no
`if __name__ == "__main__"`.

The processes wait for more work for a minute, as a model's graphs are compiled one after the other. They see no
device.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

__all__ = ["TOOL_PATHS", "compile_all"]

_WORKER = Path(__file__).with_name("triton_worker.py")

_LIMIT = 300.0
"""Seconds for one kernel; more is a compiler that hangs."""

_MOST = 32
"""Processes at once, on however many cores: each takes some 200 MB."""

TOOL_PATHS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH")
"""Environment variables that name NVIDIA's programs where Triton's package does not hold them."""

_FOREIGN = ("DISABLE_", "LLVM_", "MLIR_", "NVPTX_", "PTXAS_", "PYTHONWARNINGS", "TRITON_", "USE_IR_LOC")
"""Environment variables that begin so change how Triton compiles, and may not."""


def compile_all(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer each request, by several processes if there are several requests.

    Args:
        requests: each as `triton_worker.py` reads it, without path and folder.

    Returns:
        The response of each: {"variants": …}, or {"error": the reason}.
    """
    if not requests:
        return []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(len(requests), cores, _MOST), "ort_dynamo-triton") as threads:
        try:
            return list(threads.map(_compile, requests))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


class _Worker:
    """One process."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        environment |= {name: os.environ[name] for name in TOOL_PATHS if name in os.environ}
        environment |= {"TRITON_DISABLE_LINE_INFO": "1", "CUDA_VISIBLE_DEVICES": ""}
        if not sys.executable:
            raise OSError("the path of the Python interpreter is unknown")
        with contextlib.ExitStack() as stack:
            self._errors: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                text=True,
                start_new_session=True,  # an interrupt of the user's is for this process to act on
            )
            stack.pop_all()  # the file is there as long as the process

    def is_there(self) -> bool:
        return self._process.poll() is None

    def response(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the response, which is an error if the process crashes; None if it had ended for want of requests."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._process.kill()

        limit = threading.Timer(_LIMIT, stop)
        limit.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which its status tells
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if line.endswith("\n"):
            return dict(json.loads(line))
        status = self._process.wait()
        if status == 0:
            return None
        if late.is_set():
            return {"error": f"it took longer than {_LIMIT:g} s"}
        self._errors.seek(0)
        said = self._errors.read()[-2000:].decode(errors="replace").strip()
        return {"error": f"Triton's process ended with status {status}: {said}"}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def forget(self) -> None:
        """Leave the process to the one that started it; this one is a fork."""
        self._process.returncode = 0


_waiting: list[_Worker] = []
_lock = threading.Lock()


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ort_dynamo-triton-") as folder:
        request = {**request, "path": [*map(str, sys.path)], "folder": folder}
        try:
            while (worker := _idle_worker()) is not None:
                if not worker.is_there():
                    worker.close()
                elif (response := _sent(worker, request)) is not None:
                    return response
            return _sent(_Worker(), request) or {"error": "Triton's process ended at once"}
        except OSError as error:
            return {"error": f"Triton's process cannot be started: {error}"}


def _sent(worker: _Worker, request: dict[str, Any]) -> dict[str, Any] | None:
    response = worker.response(request)
    if worker.is_there():
        with _lock:
            _waiting.append(worker)
    else:
        worker.close()
    return response


def _idle_worker() -> _Worker | None:
    with _lock:
        return _waiting.pop() if _waiting else None


def _close_all() -> None:
    while (worker := _idle_worker()) is not None:
        worker.close()


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it
    for worker in _waiting:
        worker.forget()
    _waiting.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)
