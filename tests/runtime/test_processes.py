"""Tests of sessions at a fork and at the end of a process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from forked import run_program

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

_PARENT = """
import gc, multiprocessing, os, signal, sys, warnings, weakref
import torch
import ort_dynamo
from ort_dynamo.cache.open_island import CACHE

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of threads in a process that forks
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))
f = torch.compile(net, backend="ort_train", options={"threads": 2, "placement": "onnxruntime"})
x = torch.randn(4, 3, 8, 8)
want = f(x)
want.sum().backward()


def torch_trains():
    # Builds of torch for CUDA refuse a backward in the child of a process that has run one, in eager as well.
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError as error:
        assert "fork-based multiprocessing" in str(error), error
        return False
    return True


def sessions():
    return [compiled._own.session for compiled, _ in CACHE._entries.values()]


def step():
    # Weak, because the id of a session that went is free for the next one.
    parents = [weakref.ref(session) for session in sessions()]
    net.zero_grad()
    loss = f(x)
    trains = torch_trains()
    if trains:
        loss.sum().backward()
    torch.testing.assert_close(loss, want)
    own = [session for session in sessions() if all(parent() is not session for parent in parents)]
    assert len(own) == 1 + trains, own  # those that ran


def free():
    step()
    torch._dynamo.reset()
    gc.collect()
    assert len(CACHE) == 0


def fork():
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            globals()[sys.argv[1]]()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            return f(x)[index]


def load():
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(list(loader)), f(x))


def again():
    step()
    child = os.fork()
    if not child:
        signal.alarm(60)
        step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


load() if sys.argv[1] == "load" else fork()
f(x).sum().backward()  # the parent's own still work
print("done")
"""


@pytest.mark.parametrize("what", ["step", "free", "load", "again"])
def test_a_forked_child(what: str) -> None:
    root = Path(__file__).resolve().parents[2]
    done = run_program(_PARENT, what, timeout=240, cwd=root)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stdout + done.stderr


_PROFILED = """
import torch

settings = {"enable_profiling": True, "profile_file_prefix": "session"}
double = torch.compile(lambda x: (2 * x).cos(), backend="ort_train", options={"session_options": settings})
double(torch.ones(3))
"""


def test_profiles_are_written_at_the_end_of_a_program(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    run_program(_PROFILED, timeout=240, cwd=tmp_path, env=environment).check_returncode()
    events = [event for file in tmp_path.glob("session*.json") for event in json.loads(file.read_text())]
    assert {"Mul", "Cos"} <= {event["args"]["op_name"] for event in events if event["cat"] == "Node"}
