"""Tests of loading and launching cubins, with a driver that only records calls."""

from __future__ import annotations

import ctypes
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fused_models import FLOAT, N, Registration, model, open_model, rows, rows_op

from ort_dynamo.graph.fused_op import FusedOp, FusedOutput, Size
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.kernels.fused_kernel import CompiledKernel, FusedKernel, KernelVariant

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the driver that records is built with gcc")

ARGUMENTS = 16


def cubin(image: bytes, num_warps: int = 4, shared: int = 0) -> KernelVariant:
    return KernelVariant(image, f"entry_{chr(image[0])}", num_warps, shared, 2)


BOTH = CompiledKernel(cubin(b"aligned"), cubin(b"unaligned"))
ONE_NODE = "(float[n, 4] x) => (float[n, 4] y) { y = fused.k (x) }"


class Launch(ctypes.Structure):
    """`Launch` of fake_driver.c."""

    _fields_ = (
        ("kernel", ctypes.c_uint64),
        ("grid", ctypes.c_uint64 * 3),
        ("block", ctypes.c_uint64 * 3),
        ("shared", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("words", ctypes.c_uint64 * ARGUMENTS),
    )


class FakeDriver:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)
        self.library.fake_calls.restype = ctypes.c_char_p
        self.library.fake_launch.restype = ctypes.POINTER(Launch)
        self.library.fake_context.restype = ctypes.c_void_p
        self.library.fake_reset(2)

    def calls(self, *functions: str) -> list[str]:
        """List the recorded calls of these functions (of all, without any), with arguments."""
        lines = self.library.fake_calls().decode().splitlines()
        return [line for line in lines if not functions or line.split()[0] in functions]

    def launches(self) -> list[Launch]:
        return [self.library.fake_launch(index)[0] for index in range(self.library.fake_launch_count())]

    def fail(self, function: str, error: int) -> None:
        self.library.fake_fail(function.encode(), error)


@pytest.fixture
def driver(fake_driver: Path) -> FakeDriver:
    return FakeDriver(fake_driver)


@pytest.fixture
def launching(registration_with: Callable[[str], Registration], driver: FakeDriver) -> Registration:
    return registration_with(driver.path)


def kernel_of(code: CompiledKernel, op: FusedOp | None = None) -> FusedKernel:
    return FusedKernel(op or rows_op("k"), code, None)


def run_at(session: Any, x: int, y: int, count: int) -> None:
    """Run a session whose input and output, of [count, 4], are at these addresses."""
    places = session.io_binding()
    places.bind_input("x", "cpu", 0, np.float32, [count, 4], x)
    places.bind_output("y", "cpu", 0, np.float32, [count, 4], y)
    session.run_with_iobinding(places)


@pytest.fixture
def memory() -> tuple[Any, int]:
    """Some memory, and the first address in it that is a multiple of 16."""
    array = np.zeros(256, np.float32)
    return array, -(-array.ctypes.data // 16) * 16


@pytest.mark.parametrize(
    ("offset_x", "offset_y", "expected"), [(0, 128, "a"), (0, 132, "u"), (4, 128, "u"), (8, 136, "u"), (16, 160, "a")]
)
def test_the_variant_is_chosen_by_the_addresses(
    launching: Registration, driver: FakeDriver, memory: Any, offset_x: int, offset_y: int, expected: str
) -> None:
    session = open_model(model(ONE_NODE), launching, [kernel_of(BOTH)])
    run_at(session, memory[1] + offset_x, memory[1] + offset_y, 2)
    (launch,) = driver.launches()
    assert chr(launch.kernel) == expected
    assert list(launch.words[:2]) == [memory[1] + offset_x, memory[1] + offset_y]


def test_the_arguments_are_inputs_outputs_symbols_and_nulls(launching: Registration, driver: FakeDriver) -> None:
    m = Size(1, (1,))
    outputs = (FusedOutput(FLOAT, (N, m)), FusedOutput(7, (m,)))
    op = FusedOp("k", (FLOAT, 7), outputs, ((0, 0), (1, 0)), N * m * Size(5), 8, "")
    graph = "(float[n] x, int64[m] z) => (float[n, m] a, int64[m] b) { a, b = fused.k (x, z) }"
    code = CompiledKernel(cubin(b"aligned", 2, 400), cubin(b"unaligned", 8, 800))
    session = open_model(model(graph), launching, [kernel_of(code, op)])
    x, z = np.ones(3, np.float32), np.ones(7, np.int64)
    a, b = np.empty((3, 7), np.float32), np.empty(7, np.int64)
    places = session.io_binding()
    for bind, name, array in (
        (places.bind_input, "x", x),
        (places.bind_input, "z", z),
        (places.bind_output, "a", a),
        (places.bind_output, "b", b),
    ):
        bind(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
    driver.library.fake_reset(10)
    session.run_with_iobinding(places)
    (launch,) = driver.launches()
    assert list(launch.words[:6]) == [*(array.ctypes.data for array in (x, z, a, b)), 3, 7]
    assert list(launch.words[6:10]) == [0, 0, 0, 0]
    assert list(launch.grid) == [-(-3 * 7 * 5 // 8), 1, 1]
    assert list(launch.block) == [64, 1, 1]
    assert launch.shared == 400
    assert launch.stream == 0  # the CPU's provider has none
    assert driver.calls("cuLaunchKernel") == ["cuLaunchKernel"]


def test_an_empty_tensor_launches_nothing(launching: Registration, driver: FakeDriver) -> None:
    session = open_model(model(ONE_NODE), launching, [kernel_of(BOTH)])
    assert session.run(None, {"x": rows(0)})[0].shape == (0, 4)
    assert driver.launches() == []
    assert driver.calls("cuCtxSetCurrent") == []


def test_a_thread_without_a_context_is_given_that_of_the_device(launching: Registration, driver: FakeDriver) -> None:
    session = open_model(model(ONE_NODE), launching, [kernel_of(BOTH)])
    driver.library.fake_reset(2)
    contexts = []

    def runs() -> None:
        for _ in range(2):
            session.run(None, {"x": rows(2)})
        contexts.append(driver.library.fake_context())

    runs()
    once = ["cuPointerGetAttribute 9", "cuDeviceGet 3", "cuDevicePrimaryCtxRetain 30", "cuCtxSetCurrent 1030"]
    assert driver.calls() == [*once, "cuLaunchKernel", "cuLaunchKernel"]
    thread = threading.Thread(target=runs)
    thread.start()
    thread.join()
    assert driver.calls() == [*once, "cuLaunchKernel", "cuLaunchKernel"] * 2
    assert contexts == [1030, 1030]


def test_an_existing_context_stays_current(launching: Registration, driver: FakeDriver) -> None:
    session = open_model(model(ONE_NODE), launching, [kernel_of(BOTH)])
    driver.library.fake_reset(2)
    driver.library.cuCtxSetCurrent(ctypes.c_void_p(77))
    session.run(None, {"x": rows(2)})
    assert driver.calls() == ["cuCtxSetCurrent 77", "cuLaunchKernel"]
    assert driver.library.fake_context() == 77


def test_much_shared_memory_is_asked_for_once(launching: Registration, driver: FakeDriver, memory: Any) -> None:
    code = CompiledKernel(cubin(b"aligned", shared=48 * 1024), cubin(b"unaligned", shared=48 * 1024 + 16))
    session = open_model(model(ONE_NODE), launching, [kernel_of(code)])
    for offset in (0, 0, 4, 4, 0):
        run_at(session, memory[1] + offset, memory[1] + 128, 2)
    assert driver.calls("cuKernelSetAttribute") == ["cuKernelSetAttribute 8 49168 u 30"]
    assert [launch.shared for launch in driver.launches()] == [49152, 49152, 49168, 49168, 49152]


def test_cubins_are_loaded_once_when_a_session_is_opened(launching: Registration, driver: FakeDriver) -> None:
    code = CompiledKernel(cubin(b"aligned once"), cubin(b"unaligned once"))
    sessions = [open_model(model(ONE_NODE), launching, [kernel_of(code)]) for _ in range(2)]
    loads = ["cuLibraryLoadData aligned", "cuLibraryLoadData unalign"]  # the image's first letters
    assert driver.calls("cuLibraryLoadData") == loads
    assert driver.calls("cuLibraryGetKernel") == ["cuLibraryGetKernel a entry_a", "cuLibraryGetKernel u entry_u"]
    for session in sessions:
        session.run(None, {"x": rows(2)})
    assert driver.calls("cuLibraryLoadData") == loads


@pytest.mark.parametrize("function", ["cuLibraryLoadData", "cuLibraryGetKernel"])
def test_a_cubin_that_does_not_load_is_an_error_of_opening(
    launching: Registration, driver: FakeDriver, function: str
) -> None:
    driver.fail(function, 209)
    kernel = kernel_of(CompiledKernel(cubin(b"aligned"), cubin(f"unaligned {function}".encode())))
    with pytest.raises(Exception, match=rf"The fused kernel k failed: {function} gave error 209 \(FAKE_ERROR\)"):
        open_model(model(ONE_NODE), launching, [kernel])
    driver.library.fake_reset(2)
    open_model(model(ONE_NODE), launching, [kernel]).run(None, {"x": rows(2)})
    assert len(driver.launches()) == 1


@pytest.mark.parametrize(
    "function",
    ["cuPointerGetAttribute", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLaunchKernel"],
)
def test_an_error_of_a_launch_is_one_of_the_run(launching: Registration, driver: FakeDriver, function: str) -> None:
    session = open_model(model(ONE_NODE), launching, [kernel_of(BOTH)])
    driver.library.fake_reset(2)
    driver.fail(function, 700)
    with pytest.raises(Exception, match=rf"The fused kernel k failed: {function} gave error 700 \(FAKE_ERROR\)"):
        session.run(None, {"x": rows(2)})
    driver.fail("", 0)
    session.run(None, {"x": rows(2)})


def test_too_many_programs_are_an_error_of_the_run(launching: Registration, driver: FakeDriver) -> None:
    op = FusedOp("k", (FLOAT,), (FusedOutput(FLOAT, (N,)),), ((0, 0),), Size(2**30, (0,)), 1, "")
    session = open_model(model("(float[n] x) => (float[n] y) { y = fused.k (x) }"), launching, [kernel_of(BOTH, op)])
    session.run(None, {"x": np.ones(1, np.float32)})
    assert list(driver.launches()[0].grid) == [2**30, 1, 1]
    with pytest.raises(Exception, match=f"The fused kernel k failed: {2**31} programs are too many"):
        session.run(None, {"x": np.ones(2, np.float32)})


@pytest.mark.parametrize(("name", "said"), [("libno-driver.so", "libno-driver.so"), ("libm.so.6", "has no cuInit")])
def test_a_driver_that_is_none_is_an_error_of_opening(
    registration_with: Callable[[str], Registration], name: str, said: str
) -> None:
    with pytest.raises(Exception, match=f"The fused kernel k failed: .*{said}"):
        open_model(model(ONE_NODE), registration_with(name), [kernel_of(BOTH)])


def test_cubins_of_the_cuda_provider_are_not_run_by_the_cpu(launching: Registration, driver: FakeDriver) -> None:
    kernel = FusedKernel(rows_op("k"), BOTH, "CUDAExecutionProvider")
    if "CUDAExecutionProvider" in onnxruntime().get_available_providers():
        pytest.skip("another message, by the provider's own")
    with pytest.raises(Exception, match="Could not find an implementation for k"):
        open_model(model(ONE_NODE), launching, [kernel])
    assert driver.calls() == []
