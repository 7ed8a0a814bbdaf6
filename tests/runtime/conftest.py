"""Both ways to register fused kernels, and a driver of CUDA that only records."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fused_models import Registration

from ort_dynamo.runtime.kernels.fused_kernel import DRIVER, Unavailable
from ort_dynamo.runtime.kernels.kernel_callbacks import KernelCallbacks
from ort_dynamo.runtime.kernels.kernel_library import KernelLibrary


@functools.cache
def _register_by(way: str, driver: str) -> Registration | Unavailable:
    return KernelLibrary.load(None, driver) if way == "library" else KernelCallbacks.load(driver)


@pytest.fixture(params=["library", "callbacks"])
def registration_with(request: pytest.FixtureRequest) -> Callable[[str], Registration]:
    def registered(driver: str) -> Registration:
        found = _register_by(request.param, driver)
        if isinstance(found, Unavailable):  # test_kernel_registration.py says where that is right
            pytest.skip(found.reason)
        return found

    return registered


@pytest.fixture
def registration(registration_with: Callable[[str], Registration]) -> Registration:
    return registration_with(DRIVER)


@functools.cache
def _fake_driver() -> Path:
    path = Path(tempfile.mkdtemp(prefix="fake-driver-")) / "libcuda.so"
    source = Path(__file__).with_name("fake_driver.c")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", path, source, "-pthread"], check=True)
    return path


@pytest.fixture
def fake_driver() -> Path:
    return _fake_driver()
