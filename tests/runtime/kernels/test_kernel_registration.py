"""The C library is built, stored and found; callbacks replace it; without either, the reason is given."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fused_models import model, open_model, rows, rows_kernel

from ort_dynamo.runtime.installed.importing import binding, onnxruntime
from ort_dynamo.runtime.kernels import c_api
from ort_dynamo.runtime.kernels.c_api import options_address
from ort_dynamo.runtime.kernels.fused_kernel import Unavailable
from ort_dynamo.runtime.kernels.kernel_callbacks import KernelCallbacks
from ort_dynamo.runtime.kernels.kernel_library import KernelLibrary
from ort_dynamo.runtime.kernels.kernel_registration import find_registration, registration

ONE_NODE = "(float[n, 4] x) => (float[n, 4] y) { y = fused.k (x) }"
ROOT = Path(__file__).resolve().parents[3]
HAS_SECOND_COPY = any(Path(binding().__file__).parent.glob("libonnxruntime.so.*"))

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")

FIND = """
import sys
from pathlib import Path
from ort_dynamo.runtime.kernels.library_build import built_library
found, _ = built_library(Path(sys.argv[1]) if sys.argv[1] else None)
print(found)
"""


def in_a_process(program: str, *arguments: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def runs(found: object) -> bool:
    assert isinstance(found, KernelLibrary | KernelCallbacks)
    session = open_model(model(ONE_NODE), found, [rows_kernel("k", lambda x: x + np.float32(1))])
    return bool((session.run(None, {"x": rows(2)})[0] == rows(2) + 1).all())


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    monkeypatch.delenv("CC", raising=False)


def compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_a_stored_library_is_found_by_another_process(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    first = find_registration(folder)
    assert isinstance(first, KernelLibrary)
    assert runs(first)
    assert list(folder.iterdir()) == [first.path]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert in_a_process(FIND, str(folder), PATH="/no programs", CC="") == str(first.path)


@needs_compiler
def test_processes_that_build_it_at_once_do_no_harm(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FIND, str(tmp_path / "kept")]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate()[0].strip() for process in processes}
    (path,) = (tmp_path / "kept").iterdir()
    assert said == {str(path)}


@needs_compiler
def test_the_variable_cc_names_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcc = shutil.which("gcc")
    wrapper = compiler(tmp_path / "wrapper", f'echo "$@" > {tmp_path}/arguments; exec {gcc} "$@"')
    monkeypatch.setenv("CC", f"{wrapper} -DWITH_A_FLAG")
    assert runs(find_registration(tmp_path / "kept"))
    assert (tmp_path / "arguments").read_text().startswith("-DWITH_A_FLAG ")


@needs_compiler
def test_another_compiler_serves_if_that_of_cc_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path / "broken", "exit 1"))
    assert isinstance(find_registration(tmp_path / "kept"), KernelLibrary)


def test_a_compiler_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: None) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path / "broken", "echo it is out of order >&2; echo more >&2; exit 3"))
    found = KernelLibrary.load(tmp_path / "kept")
    assert isinstance(found, Unavailable)
    assert found.reason.endswith("broken failed: it is out of order; there is no gcc; there is no clang")
    assert not (tmp_path / "kept").exists()


def test_callbacks_take_the_place_of_the_library(tmp_path: Path, no_compiler: None) -> None:
    found = find_registration(tmp_path / "kept")
    if HAS_SECOND_COPY:
        assert isinstance(found, KernelCallbacks)
        assert runs(found)
    else:
        assert isinstance(found, Unavailable)


def test_where_nothing_can_be_had_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: None
) -> None:
    monkeypatch.setattr(onnxruntime(), "__version__", "0.1")
    found = find_registration(tmp_path / "kept")
    assert isinstance(found, Unavailable)
    assert found.reason == (
        "the library is not built (there is no gcc; there is no clang), and there is no libonnxruntime.so.0.1 beside "
        + Path(binding().__file__).name
    )


@pytest.mark.skipif(not HAS_SECOND_COPY, reason="this wheel has no second copy")
def test_callbacks_need_the_layout_that_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_api, "_OBJECT_SIZE", 64)
    assert KernelCallbacks.load() == Unavailable("the memory layout of SessionOptions is unknown")


def test_options_are_found_only_where_they_are_options() -> None:
    settings = onnxruntime().SessionOptions()
    settings.execution_mode = onnxruntime().ExecutionMode.ORT_PARALLEL
    assert options_address(settings)
    assert settings.execution_mode == onnxruntime().ExecutionMode.ORT_PARALLEL
    assert options_address(onnxruntime().RunOptions()) is None
    assert options_address(object()) is None


@pytest.mark.skipif(not HAS_SECOND_COPY, reason="this wheel has no second copy")
def test_a_second_copy_of_another_api_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_api, "API_VERSION", 10_000)
    found = KernelCallbacks.load()
    assert isinstance(found, Unavailable)
    assert found.reason.endswith("has no C API 10000")


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with caplog.at_level(logging.INFO, "ort_dynamo"):
        found = find_registration(folder)
    assert isinstance(found, KernelLibrary)
    assert found.path.parent != folder
    assert found.path.parent.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []
    assert "can be written by other users" in caplog.text


@needs_compiler
def test_a_file_that_others_can_write_to_is_not_loaded(tmp_path: Path) -> None:
    first = find_registration(tmp_path)
    assert isinstance(first, KernelLibrary)
    first.path.chmod(0o666)
    assert in_a_process(FIND, str(tmp_path)) != str(first.path)
    target = first.path.rename(tmp_path / "elsewhere")
    target.chmod(0o600)
    first.path.symlink_to(target)
    assert in_a_process(FIND, str(tmp_path)) != str(first.path)


@needs_compiler
def test_a_folder_that_cannot_be_made_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = find_registration(tmp_path / "file" / "folder")
    assert isinstance(found, KernelLibrary)
    assert runs(found)


@needs_compiler
def test_a_damaged_library_is_built_anew(tmp_path: Path) -> None:
    said = in_a_process(FIND, str(tmp_path))
    Path(said).write_bytes(b"no library")
    found = find_registration(tmp_path)
    assert isinstance(found, KernelLibrary)
    assert str(found.path) == said
    assert runs(found)


@needs_compiler
def test_a_private_library_goes_with_its_process() -> None:
    fork = "\nimport os\npid = os.fork()\nif pid == 0:\n    sys.exit()\nos.waitpid(pid, 0)\nassert found.exists()"
    path = Path(in_a_process(FIND + fork, "").splitlines()[0])
    assert path.suffix == ".so"
    assert not path.parent.exists()


@needs_compiler
def test_a_library_that_onnx_runtime_does_not_share_is_an_error(tmp_path: Path) -> None:
    found = find_registration(tmp_path)
    assert isinstance(found, KernelLibrary)
    copy = shutil.copy(found.path, tmp_path / "copy.so")
    found.path = Path(copy)
    with pytest.raises(RuntimeError, match="did not register"):
        found.register(onnxruntime().SessionOptions(), [rows_kernel("k", lambda x: x)])


@needs_compiler
def test_each_thread_has_a_list_of_its_own(tmp_path: Path) -> None:
    found = find_registration(tmp_path)
    assert isinstance(found, KernelLibrary)
    settings = [onnxruntime().SessionOptions() for _ in range(2)]
    kernels = [rows_kernel("k", lambda x: x + np.float32(1)), rows_kernel("k", lambda x: x + np.float32(2))]

    class Interrupted:
        """Another thread registers its kernels right before these."""

        def register_custom_ops_library(self, path: str) -> None:
            thread = threading.Thread(target=found.register, args=(settings[1], [kernels[1]]))
            thread.start()
            thread.join()
            settings[0].register_custom_ops_library(path)

    found.register(Interrupted(), [kernels[0]])
    for term, one in enumerate(settings, start=1):
        session = onnxruntime().InferenceSession(model(ONE_NODE), one, providers=["CPUExecutionProvider"])
        np.testing.assert_array_equal(session.run(None, {"x": rows(2)})[0], rows(2) + term)


@needs_compiler
def test_kernels_that_were_not_registered_are_not_registered_later(tmp_path: Path) -> None:
    found = find_registration(tmp_path)
    assert isinstance(found, KernelLibrary)
    settings = onnxruntime().SessionOptions()

    class Failing:
        def register_custom_ops_library(self, path: str) -> None:
            raise OSError("no library")

    with pytest.raises(OSError, match="no library"):
        found.register(Failing(), [rows_kernel("k", lambda x: x)])
    settings.register_custom_ops_library(str(found.path))
    found.register(settings, [rows_kernel("k", lambda x: x)])  # the domain would be there already
    onnxruntime().InferenceSession(model(ONE_NODE), settings, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("way", [lambda: KernelLibrary.load(None), KernelCallbacks.load], ids=["library", "callbacks"])
def test_a_registration_outlives_its_sessions(way: Callable[[], KernelLibrary | KernelCallbacks | Unavailable]) -> None:
    found = way()
    if isinstance(found, Unavailable):
        pytest.skip(found.reason)
    session = open_model(model(ONE_NODE), found, [rows_kernel("k", lambda x: x + np.float32(1))])
    still = weakref.ref(found)
    del found
    gc.collect()
    assert still() is not None
    np.testing.assert_array_equal(session.run(None, {"x": rows(2)})[0], rows(2) + 1)


@needs_compiler
@pytest.mark.parametrize("compiler", ["gcc", None], ids=["library", "callbacks"])
def test_a_process_ends_with_a_session_that_is_open(compiler: str | None) -> None:
    if compiler is None and not HAS_SECOND_COPY:
        pytest.skip("this wheel has no second copy")
    program = """
import sys
sys.path[:0] = ["tests/runtime", "tests/runtime/kernels"]
from test_kernel_registration import ONE_NODE, find_registration, model, open_model, rows, rows_kernel
found = find_registration(None)
sys.kept = [open_model(model(ONE_NODE), found, [rows_kernel("k", lambda x: x)])]
sys.kept += [sys.kept, sys.kept[0].run(None, {"x": rows(2)})]
print(found.how)
"""
    said = in_a_process(program, **({} if compiler else {"PATH": "/no programs", "CC": ""}))
    assert said == ("library" if compiler else "callbacks")


def test_a_process_has_one_registration(tmp_path: Path) -> None:
    assert registration(tmp_path / "one") is registration(tmp_path / "other")


def test_equal_kernels_share_an_operator(tmp_path: Path) -> None:
    found = find_registration(tmp_path)
    if isinstance(found, Unavailable):
        pytest.skip(found.reason)

    def negative(x: object) -> object:
        return np.negative(x)

    for _ in range(2):
        open_model(model(ONE_NODE), found, [rows_kernel("k", negative)])
    assert len(found._made) == 1
