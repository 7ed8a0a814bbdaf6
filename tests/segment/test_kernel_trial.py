"""Fused kernels are tried on the device first; the CPU stands for one here, with kernels in their NumPy form."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fused_on_cpu import fused_on_the_cpu

from ort_dynamo.options.groups import CacheOptions, parse_options
from ort_dynamo.runtime import session
from ort_dynamo.runtime.providers import find_target, recorded_cuda_targets
from ort_dynamo.segment import kernel_trial
from ort_dynamo.segment import segment as segment_module
from ort_dynamo.segment.segment import allowed_target

OFF = CacheOptions(disk_cache=False)
Device = Callable[[str], list[str]]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Takes the beginning of a kernel's name, which gives wrong numbers; gives the names of what is opened."""
    wrong, opened = ["nothing"], list[str]()

    def factor(name: str) -> float:
        opened.append(name)
        return 1.1 if name.startswith(wrong[0]) else 1

    def pretend(kernel: str) -> list[str]:
        wrong[0] = kernel
        return opened

    on_cpu, cpu = torch.device("cpu"), find_target("cpu")
    monkeypatch.setattr(kernel_trial, "find_target", lambda _: cpu)
    tried = kernel_trial._tried
    monkeypatch.setattr(kernel_trial, "_tried", lambda target, _, options: tried(target, on_cpu, options))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel_trial._work.cache_clear()
    with fused_on_the_cpu(factor):
        yield pretend
    kernel_trial._work.cache_clear()


def test_right_kernels_work_and_are_tried_once(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    opened = device("none is wrong")
    with caplog.at_level(logging.WARNING):
        assert kernel_trial.kernels_work(OFF)
        assert kernel_trial.kernels_work(OFF)
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
        assert not kernel_trial.kernels_work(OFF)
    assert f"the kernel {named!r} of the trial is off" in caplog.text


def test_an_error_is_the_answer(
    device: Device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("cuLaunchKernel gave error 1")

    device("none")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(session, "session_kernels", refused)  # undone before the fixture's own
        assert not kernel_trial.kernels_work(OFF)
    assert "RuntimeError: cuLaunchKernel gave error 1" in caplog.text


@pytest.mark.parametrize("works", [False, True])
def test_a_target_fuses_if_kernels_work(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    target = dataclasses.replace(recorded_cuda_targets()[-1], fuses_kernels=True)
    monkeypatch.setattr(segment_module, "kernels_work", lambda _: works)
    assert allowed_target(target, parse_options(None, {})).fuses_kernels == works
    assert not allowed_target(target, parse_options(None, {"fuse": False})).fuses_kernels
    monkeypatch.delattr(segment_module, "kernels_work")  # nothing is tried for a target that does not fuse
    assert not allowed_target(recorded_cuda_targets()[-1], parse_options(None, {})).fuses_kernels
