"""The garbage collector's thresholds during a compile, and after it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from ort_dynamo.compilation.events import GraphCompilation, Listener
from ort_dynamo.program.garbage import fewer_collections

_OWN = (600, 9, 8)


@pytest.fixture(autouse=True)
def own_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*_OWN)
    yield
    gc.set_threshold(*before)


def test_they_are_higher_until_the_last_compile_ends() -> None:
    with fewer_collections():
        raised = gc.get_threshold()
        with fewer_collections():
            assert gc.get_threshold() == raised
        assert gc.get_threshold() == raised
    assert raised[0] > _OWN[0]
    assert raised[2] > _OWN[2]
    assert gc.get_threshold() == _OWN


def test_an_error_puts_them_back() -> None:
    with pytest.raises(KeyboardInterrupt), fewer_collections():
        raise KeyboardInterrupt
    assert gc.get_threshold() == _OWN


@pytest.mark.parametrize("chosen", [(0, 10, 10), (10**6, 10, 10)], ids=["off", "higher"])
def test_those_of_a_program_that_wants_fewer_stay(chosen: tuple[int, int, int]) -> None:
    gc.set_threshold(*chosen)
    with fewer_collections():
        assert gc.get_threshold() == chosen
    assert gc.get_threshold() == chosen


def test_those_that_the_program_sets_meanwhile_stay() -> None:
    with fewer_collections():
        gc.set_threshold(1234, 5, 6)
    assert gc.get_threshold() == (1234, 5, 6)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_the_own_ones() -> None:
    with fewer_collections():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.get_threshold() == _OWN else 1)
        _, status = os.waitpid(child, 0)
        assert gc.get_threshold() != _OWN
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_compile_raises_them_and_puts_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Watch(Listener):
        def begun(self, graph: GraphCompilation) -> None:
            seen.append(gc.get_threshold())

    monkeypatch.setattr("ort_dynamo.backend.EXTRA_LISTENERS", [Watch])
    torch.compile(lambda x: x.sin().cos(), backend="ort_train")(torch.ones(3))
    assert seen
    assert _OWN not in seen
    assert gc.get_threshold() == _OWN
