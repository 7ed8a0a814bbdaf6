"""Memory that runs out is an error, and the next step is right."""

from __future__ import annotations

import sys

import pytest
from children import ran

from ort_dynamo.errors import ExecutionError, SessionMemoryError
from ort_dynamo.runtime.data_errors import data_error

PROGRAM = """
import resource, torch
from torch.nn import functional as F
from ort_dynamo.errors import SessionMemoryError

torch.set_num_threads(1)


def in_a_session(x, w):
    return torch.tanh(x[:, None, :] * w[None, :, :]).sum()


def in_torch(x, w):  # torch draws the random mask, and a session reads it
    return F.dropout((x @ w.t()).sin(), 0.5).sum()


def room(nbytes):
    status = open("/proc/self/status").read()
    now = 1024 * int(status.partition("VmSize:")[2].split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (now + nbytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def data(rows):
    return torch.linspace(-1, 1, 16 * rows).view(rows, 16), torch.linspace(0, 1, 16 * rows).view(rows, 16)


def step(function, rows):
    x, w = data(rows)
    w.requires_grad_()
    torch.manual_seed(0)
    loss = function(x, w)
    loss.backward()
    return loss.detach(), w.grad


for function, kind in ((in_a_session, SessionMemoryError), (in_torch, RuntimeError)):
    compiled = torch.compile(function, backend="ort_train", dynamic=True, options={"placement": "onnxruntime"})
    step(compiled, 8)
    room(1 << 28)
    for rows in (9, 10):
        try:
            step(compiled, 50_000)
        except kind as error:
            assert "DefaultCPUAllocator: can't allocate memory" in str(error), error
        else:
            raise AssertionError("there was enough memory")
        torch.testing.assert_close(step(compiled, rows), step(function, rows))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_a_step_after_one_without_memory_is_right() -> None:
    out, _ = ran(PROGRAM)
    assert out == "done\n"


@pytest.mark.parametrize(
    "words",
    [
        "bfc_arena.cc:376 AllocateRawInternal Failed to allocate memory for requested buffer of size 9216000000",
        "Exception during initialization: std::bad_alloc",
    ],
)
def test_messages_of_memory_have_a_class_of_their_own(words: str) -> None:
    error = data_error(words, {})
    assert isinstance(error, SessionMemoryError)
    assert isinstance(error, MemoryError)
    assert isinstance(error, ExecutionError)
    assert str(error).startswith("DefaultCPUAllocator: can't allocate memory")  # accelerate then halves the batch
