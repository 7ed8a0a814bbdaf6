"""ort_dynamo/program/progress.py: the line that a terminal or a notebook shows during a long compile."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ort_dynamo.program import progress
from ort_dynamo.program.progress import RUNNING, SWITCH, clocked, counted, is_shown, showing, stage

THREAD = "ort_dynamo progress"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ZMQInteractiveShell:
    """Named as the shell of a notebook's kernel is."""


class Shell(ZMQInteractiveShell):
    """Named as Colab's is."""


def compile_something() -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 3, requires_grad=True)
    torch.compile(lambda x: (x.sin() * 2).sum(), backend="ort_train")(x).backward()


def wait_for(text: str, stream: io.StringIO) -> None:
    end = time.monotonic() + 30
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.01)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(progress, "_AFTER", 0.0)
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    # Not sys.stderr itself: pytest puts its own there between a fixture and the test.
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream, modules=sys.modules))
    return stream


def test_a_stage_that_counts_nothing_is_shown_while_it_runs(terminal: Terminal) -> None:
    with showing():
        stage("tracing the model")
        wait_for("ort_train: tracing the model, 0 s", terminal)
    assert THREAD not in [one.name for one in threading.enumerate()]


def test_the_line_is_gone_in_the_end(terminal: Terminal) -> None:
    with showing():
        stage("tracing")
        wait_for("tracing", terminal)
    before_last, _, last = terminal.getvalue().rpartition("\r")
    assert last == ""
    assert not before_last.rpartition("\r")[2].strip()  # the last line is written over


def test_nodes_are_counted(terminal: Terminal) -> None:
    with showing():
        stage("before")
        for letter in counted("abcd", "letters"):
            if letter == "c":
                wait_for("2 of 4 nodes", terminal)
        stage("after")
        wait_for("ort_train: after, ", terminal)
    assert "ort_train: letters: " in terminal.getvalue()


def test_a_compile_names_its_stages(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = []
    monkeypatch.setattr(progress._Progress, "stage", lambda self, name, total=None: stages.append((name, total)))
    compile_something()
    assert list(dict(stages)) == [
        "tracing the model",
        "splitting forward and backward",
        "choosing where operators run",
        "translating to ONNX",
        "optimizing the ONNX model",
        "optimizing in ONNX Runtime",
        "starting an ONNX Runtime session",
        "preparing the graph that calls the sessions",
    ]
    assert {name for name, total in stages if total} == {"choosing where operators run", "translating to ONNX"}


def test_a_short_compile_shows_no_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_AFTER", 600.0)
    monkeypatch.setattr(sys, "stderr", terminal)
    compile_something()
    (line,) = terminal.getvalue().splitlines()
    assert line == "ort_train: 7 of 7 operators run in ONNX Runtime; ort_dynamo.summary() says more"
    assert THREAD not in [one.name for one in threading.enumerate()]


def test_outside_a_compile_there_is_nothing_to_show(terminal: Terminal) -> None:
    stage("alone")
    assert list(counted("ab", "letters")) == ["a", "b"]
    assert terminal.getvalue() == ""


def test_a_failed_compile_leaves_no_line_and_no_thread(terminal: Terminal) -> None:
    def fail() -> None:
        with showing():
            stage("failing")
            wait_for("failing", terminal)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert terminal.getvalue().endswith("\r")
    assert THREAD not in [one.name for one in threading.enumerate()]


def test_a_terminal_that_is_closed_meanwhile_does_not_fail_a_compile(terminal: Terminal) -> None:
    with showing():
        stage("before")
        wait_for("before", terminal)
        terminal.close()
    assert THREAD not in [one.name for one in threading.enumerate()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_that_is_forked_meanwhile_goes_on(terminal: Terminal) -> None:
    with showing():
        stage("before")
        wait_for("before", terminal)
        child = os.fork()
        if child == 0:
            stage("in the child")
            progress._current.get().close()  # type: ignore[union-attr]
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_interpreter_that_exits_meanwhile_exits_at_once() -> None:
    program = (
        "import sys, threading, time\n"
        "from ort_dynamo.program import progress\n"
        "progress._AFTER, progress._EVERY = 0.0, 0.001\n"
        "def compiles():\n"
        "    with progress.showing():\n"
        "        time.sleep(600)\n"
        "threading.Thread(target=compiles, daemon=True).start()\n"
        "time.sleep(0.5)\n"
    )
    environment = {**os.environ, SWITCH: "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    assert done.stderr == "ort_train: preparing, 0 s\n"


@pytest.mark.parametrize(("name", "value"), [(SWITCH, "0"), ("LOCAL_RANK", "1")])
def test_nothing_is_shown_when_switched_off_or_by_another_process(
    name: str, value: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with showing():
        stage("tracing")
        assert THREAD not in [one.name for one in threading.enumerate()]
    assert terminal.getvalue() == ""


def test_a_file_shows_lines_only_if_asked(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.sys, "stderr", file := io.StringIO())
    with showing():
        assert THREAD not in [one.name for one in threading.enumerate()]
    assert file.getvalue() == ""
    monkeypatch.setenv(SWITCH, "1")
    with showing():
        stage("tracing")
        wait_for(", 0 s\n", file)
    assert "\r" not in file.getvalue()


@pytest.mark.parametrize("shell", [ZMQInteractiveShell, Shell])
def test_a_notebook_shows_a_line(shell: type, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.sys, "stderr", cell := io.StringIO())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=shell))
    with showing():
        stage("tracing")
        wait_for("\rort_train: tracing, 0 s", cell)
    assert cell.getvalue().endswith("\r")


def test_a_shell_in_a_pipe_is_no_notebook(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not is_shown()


def test_a_clock_adds_up_the_stages_of_compiles(terminal: Terminal) -> None:
    with clocked() as seconds:
        for _ in range(2):
            with showing():
                stage("tracing")
                list(counted("ab", "letters"))
            time.sleep(0.02)
        assert list(seconds) == [RUNNING, "preparing", "tracing", "letters"]
    assert seconds[RUNNING] >= 0.04 > seconds["letters"]


def test_a_clock_leaves_the_line_on_the_terminal(terminal: Terminal) -> None:
    with clocked(), showing():
        for letter in counted("ab", "letters"):
            if letter == "b":
                wait_for("1 of 2 nodes", terminal)


def test_a_clock_of_all_threads_adds_up_their_stages(terminal: Terminal) -> None:
    def compile_something() -> None:
        with showing():
            stage("building")

    for threads in (False, True):
        with clocked(threads=threads) as seconds:
            thread = threading.Thread(target=compile_something)
            thread.start()
            thread.join()
        assert ("building" in seconds) is threads
    before = dict(seconds)
    thread = threading.Thread(target=compile_something)
    thread.start()
    thread.join()
    assert seconds == before, "it is stopped"
