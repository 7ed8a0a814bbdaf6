"""Triton's worker processes: several, one after the other, crashed, hanging, ended, forked."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fused_examples import EXAMPLES, FLOAT, gelu

from ort_dynamo.cache.folder import CacheFolder
from ort_dynamo.cache.kernel_files import KernelFiles
from ort_dynamo.runtime.kernels import kernel_compiler, triton_workers
from ort_dynamo.runtime.kernels.fused_kernel import CompiledKernel
from ort_dynamo.runtime.kernels.kernel_compiler import compile_kernels

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


PROGRAM = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from fused_examples import EXAMPLES
from ort_dynamo.cache.folder import CacheFolder
from ort_dynamo.cache.kernel_files import KernelFiles
from ort_dynamo.runtime.kernels.kernel_compiler import compile_kernels
store = KernelFiles(CacheFolder(Path(sys.argv[1]), 2**31).kernels())
found = compile_kernels([make(1) for make in EXAMPLES[:2]], (9, 0), store)  # at the top level: nothing runs this again
print(json.dumps({name: len(kernel.aligned.cubin) for name, kernel in found.items()}))
"""


@needs_triton
def test_two_processes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = [sys.executable, program, tmp_path / "cache", Path(__file__).parent.parent]
    both = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (one.communicate()[0] for one in both)
    assert [one.returncode for one in both] == [0, 0]
    assert json.loads(first) == json.loads(second)
    folder = CacheFolder(tmp_path / "cache", 2**31).kernels()
    monkeypatch.setattr(kernel_compiler, "compile_all", lambda requests: [{"error": "asked"} for _ in requests])
    assert len(folder.entries()) == 2
    found = compile_kernels([make(FLOAT) for make in EXAMPLES[:2]], (9, 0), KernelFiles(folder))
    assert {name: len(kernel.aligned.cubin) for name, kernel in found.items()} == json.loads(first)  # type: ignore[union-attr]
    assert sorted(one.name for one in folder.path.iterdir()) == sorted(one.path.name for one in folder.entries())


@needs_triton
def test_a_process_of_triton_that_ends_is_a_reason_and_the_next_kernel_has_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    crashing = tmp_path / "triton_worker.py"
    crashing.write_text("import os, sys\nsys.stdin.readline()\nprint('LLVM ERROR', file=sys.stderr)\nos.abort()\n")
    triton_workers._close_all()
    with monkeypatch.context() as patched:
        patched.setattr(triton_workers, "_WORKER", crashing)
        found = compile_kernels([gelu(FLOAT)], (9, 0))
    assert found["gelu"] == "Triton does not compile it: Triton's process ended with status -6: LLVM ERROR"
    assert isinstance(compile_kernels([gelu(FLOAT)], (9, 0))["gelu"], CompiledKernel)


@needs_triton
def test_a_compiler_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = tmp_path / "triton_worker.py"
    hanging.write_text("import time\ntime.sleep(1000)\n")
    triton_workers._close_all()
    monkeypatch.setattr(triton_workers, "_WORKER", hanging)
    monkeypatch.setattr(triton_workers, "_LIMIT", 0.5)
    found = compile_kernels([gelu(FLOAT)], (9, 0))
    assert found == {"gelu": "Triton does not compile it: it took longer than 0.5 s"}


@needs_triton
def test_a_process_that_waited_too_long_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    impatient = tmp_path / "triton_worker.py"
    impatient.write_text(triton_workers._WORKER.read_text().replace("_IDLE = 60.0", "_IDLE = 0.2"))
    triton_workers._close_all()
    with monkeypatch.context() as patched:
        patched.setattr(triton_workers, "_WORKER", impatient)
        patched.setattr(triton_workers, "_LIMIT", 60.0)
        triton_workers._waiting.append(triton_workers._Worker())
        triton_workers._waiting[0]._process.wait(60)
    assert isinstance(compile_kernels([gelu(FLOAT)], (9, 0))["gelu"], CompiledKernel)


@needs_triton
def test_a_process_that_somebody_ended_while_it_waited_is_replaced() -> None:
    assert isinstance(compile_kernels([gelu(FLOAT)], (9, 0))["gelu"], CompiledKernel)
    for worker in triton_workers._waiting:
        worker._process.kill()
        worker._process.wait()
    assert isinstance(compile_kernels([gelu(FLOAT)], (9, 0))["gelu"], CompiledKernel)


def test_a_python_without_a_path_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_workers._close_all()
    monkeypatch.setattr(kernel_compiler, "triton_version", lambda: "7.1")
    for path, said in (("", "the path of the Python interpreter is unknown"), ("/nowhere/python", "No such file")):
        monkeypatch.setattr(sys, "executable", path)
        assert said in str(compile_kernels([gelu(FLOAT)], (9, 0))["gelu"])


@needs_triton
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork")
def test_a_fork_starts_processes_of_its_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import os, sys
sys.path.insert(0, sys.argv[1])
from fused_examples import gelu
from ort_dynamo.runtime.kernels import triton_workers
from ort_dynamo.runtime.kernels.kernel_compiler import CompiledKernel, compile_kernels
def one():
    assert isinstance(compile_kernels([gelu(1)], (9, 0))["gelu"], CompiledKernel)
    return triton_workers._waiting[0]._process.pid
first = one()
if os.fork() == 0:
    assert one() != first
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert one() == first
"""
    )
    subprocess.run([sys.executable, "-W", "error", program, Path(__file__).parent.parent], check=True)
