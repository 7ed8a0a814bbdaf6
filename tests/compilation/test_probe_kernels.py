"""Fused kernels are probed on the device first; here the CPU replaces it, with kernels in their NumPy form."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fused_on_cpu import fused_on_the_cpu

from ort_dynamo.compilation import choose_target, probe_kernels
from ort_dynamo.compilation.choose_target import graph_target
from ort_dynamo.options.groups import CacheOptions, parse_options
from ort_dynamo.runtime import session
from ort_dynamo.runtime.installed import providers
from ort_dynamo.runtime.installed.providers import recorded_cuda_targets

OFF = CacheOptions(disk_cache=False)
Device = Callable[[str], list[str]]

CUDA = torch.device("cuda")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Make kernels with this prefix give wrong results; give the names of the opened kernels."""
    wrong, opened = ["nothing"], list[str]()

    def factor(name: str) -> float:
        opened.append(name)
        return 1.1 if name.startswith(wrong[0]) else 1

    def pretend(kernel: str) -> list[str]:
        wrong[0] = kernel
        return opened

    on_cpu, cpu = torch.device("cpu"), providers.find_target("cpu")
    monkeypatch.setattr(probe_kernels, "find_target", lambda _: cpu)
    tried = probe_kernels._tried
    monkeypatch.setattr(probe_kernels, "_tried", lambda target, _, options: tried(target, on_cpu, options))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    probe_kernels._work.cache_clear()
    with fused_on_the_cpu(factor):
        yield pretend
    probe_kernels._work.cache_clear()


def test_right_kernels_work_and_are_tried_once(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    opened = device("none is wrong")
    with caplog.at_level(logging.WARNING):
        assert probe_kernels.kernels_work(OFF)
        assert probe_kernels.kernels_work(OFF)
    assert len(opened) == len(set(opened)) == 9
    assert not caplog.records


@pytest.mark.parametrize(
    ("kernel", "named"),
    [
        ("tanh_mul", "flat"),
        ("add_layernormalization", "rows"),
        ("mul_reducesum", "sums"),
        ("reducemean_mul_reducesum", "both"),
        ("reducemax_sub_exp_reducesum", "picked"),
        ("bitwiseand", "bits"),
        ("less_greaterorequal_or_where", "index"),
    ],
)
def test_a_wrong_kernel_is_named(device: Device, caplog: pytest.LogCaptureFixture, kernel: str, named: str) -> None:
    device(kernel)
    with caplog.at_level(logging.WARNING):
        assert not probe_kernels.kernels_work(OFF)
    assert f"the kernel {named!r} of the trial is off" in caplog.text


def test_an_error_is_the_answer(
    device: Device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("cuLaunchKernel gave error 1")

    device("none")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(session, "session_kernels", refused)  # undone before the fixture's own
        assert not probe_kernels.kernels_work(OFF)
    assert "RuntimeError: cuLaunchKernel gave error 1" in caplog.text


@pytest.mark.parametrize("works", [False, True])
def test_a_target_fuses_if_kernels_work(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    target = dataclasses.replace(recorded_cuda_targets()[-1], fuses_kernels=True)
    monkeypatch.setattr(choose_target, "usable_target", lambda _: target)
    monkeypatch.setattr(choose_target, "kernels_work", lambda _: works)
    assert graph_target(CUDA, parse_options(None, {})).fuses_kernels == works
    assert not graph_target(CUDA, parse_options(None, {"debug": {"fuse": False}})).fuses_kernels
    monkeypatch.delattr(choose_target, "kernels_work")  # nothing is probed for a target that does not fuse
    monkeypatch.setattr(choose_target, "usable_target", lambda _: recorded_cuda_targets()[-1])
    assert not graph_target(CUDA, parse_options(None, {})).fuses_kernels
