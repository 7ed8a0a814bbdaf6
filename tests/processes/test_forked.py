"""A forked program runs as in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from forked import run_program


def test_a_program_has_its_arguments_environment_and_folder(tmp_path: Path) -> None:
    program = "import os, sys; print(sys.argv, dict(os.environ), os.getcwd(), __name__, sys.stdin.read())"
    environment = {**os.environ, "ONE_MORE": "1"}
    del environment["PATH"]
    done = run_program(program, "a", "b", cwd=tmp_path, env=environment)
    assert done.stdout == f"['-c', 'a', 'b'] {environment} {tmp_path} __main__ \n"
    assert (done.returncode, done.stderr) == (0, "")


def test_a_file_finds_the_modules_beside_it_and_its_own_source(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    file = tmp_path / "program.py"
    file.write_text(
        "import beside, inspect, sys\ndef f(): return 1\nprint(beside.VALUE, inspect.getsource(f), __file__)"
    )
    assert run_program(file).stdout == f"7 def f(): return 1\n {file}\n"


def test_modules_of_a_path_in_the_environment_are_found(tmp_path: Path) -> None:
    (tmp_path / "on_the_path.py").write_text("VALUE = 7\n")
    assert run_program("import on_the_path").returncode == 1
    assert run_program("import on_the_path", env={**os.environ, "PYTHONPATH": str(tmp_path)}).returncode == 0


def test_exit_codes_and_errors_are_those_of_an_interpreter() -> None:
    assert run_program("raise SystemExit(3)").returncode == 3
    assert run_program("import os; os.abort()").returncode == -6
    done = run_program("import atexit; atexit.register(print, 'at the end'); raise ValueError('of mine')")
    assert (done.returncode, done.stdout) == (1, "at the end\n")
    assert done.stderr.endswith("ValueError: of mine\n")


def test_no_program_sees_another_or_ours() -> None:
    run_program("import builtins, warnings; builtins.left = 1", warnings=["error"])
    ours = "sorted(name for name in sys.modules if name.startswith(('ort_dynamo', 'onnx')))"
    done = run_program(f"import builtins, sys; print(hasattr(builtins, 'left'), {ours})")
    assert done.stdout == "False []\n"


def test_variables_of_an_interpreters_start_are_obeyed() -> None:
    program = "import sys; print('torch' in sys.modules, sys.flags.dev_mode)"
    assert run_program(program).stdout == "True False\n"
    assert run_program(program, env={**os.environ, "PYTHONDEVMODE": "1"}).stdout == "False True\n"


def test_torch_reads_its_logs_and_its_folder_as_at_its_import(tmp_path: Path) -> None:
    program = "import torch; torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))"
    logs = {**os.environ, "TORCH_LOGS": "+dynamo"}
    assert "torch/_dynamo" in run_program(program, env=logs).stderr
    assert run_program(program).stderr == ""
    folder = run_program("from torch._dynamo import config; print(config.debug_dir_root)", cwd=tmp_path).stdout
    assert folder == f"{tmp_path / 'torch_compile_debug'}\n"


def test_actions_for_warnings_are_obeyed() -> None:
    warned = "import warnings; warnings.warn('said', UserWarning)"
    assert "UserWarning: said" in run_program(warned).stderr
    assert run_program(warned, warnings=["ignore"]).stderr == ""
    assert run_program(warned, warnings=["error"]).returncode == 1


def test_a_program_is_killed_after_its_time_and_the_next_one_runs() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_program("import time; time.sleep(100)", timeout=0.2)
    assert run_program("print(1)").stdout == "1\n"
