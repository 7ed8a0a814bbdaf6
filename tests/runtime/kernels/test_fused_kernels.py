"""Sessions with fused kernels, which both registrations run alike."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from fused_models import (
    FLOAT,
    N,
    Registration,
    body,
    host_code,
    host_kernel,
    model,
    open_model,
    rows,
    rows_kernel,
    rows_op,
)

from ort_dynamo.graph.fused_op import ITSELF, FusedOp, FusedOutput, Size
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.kernels.fused_kernel import FusedKernel, HostCode

ONE_NODE = "(float[n, 4] x) => (float[n, 4] y) { y = fused.k (x) }"
TWICE = body("k", "y = Add (x, x)")


class Counted:
    """Doubles an array, and counts how often it does."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x * np.float32(2)


def run(session: Any, *inputs: Any) -> list[Any]:
    names = [one.name for one in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))


def test_a_registered_kernel_runs_in_place_of_the_body(registration: Registration) -> None:
    counted = Counted()
    data = model(ONE_NODE, TWICE)
    fused = open_model(data, registration, [rows_kernel("k", counted)])
    body_alone = open_model(data, None, [])
    x = rows(3)
    (expected,) = run(body_alone, x)
    assert counted.calls == 0
    (y,) = run(fused, x)
    assert counted.calls == 1
    np.testing.assert_array_equal(y, expected, strict=True)
    np.testing.assert_array_equal(y, x * 2, strict=True)


def test_a_kernel_needs_no_body(registration: Registration) -> None:
    (y,) = run(open_model(model(ONE_NODE), registration, [rows_kernel("k", Counted())]), rows(3))
    np.testing.assert_array_equal(y, rows(3) * 2, strict=True)


def test_a_model_without_a_body_is_refused_unless_its_kernel_is_registered(registration: Registration) -> None:
    for kernels in ([], [rows_kernel("other", Counted())]):
        with pytest.raises(Exception, match=r"ort_dynamo\.fused:k"):
            open_model(model(ONE_NODE), registration, kernels)


def test_a_session_has_several_kernels(registration: Registration) -> None:
    graph = (
        "(float[n, 4] x) => (float[n, 4] y) { a = fused.add (x) b = Neg (a) c = fused.square (b) y = fused.add (c) }"
    )
    add = rows_kernel("add", lambda x: x + np.float32(1))
    square = rows_kernel("square", lambda x: x * x)
    (y,) = run(open_model(model(graph), registration, [square, add]), rows(5))
    np.testing.assert_array_equal(y, (rows(5) + 1) ** 2 + 1, strict=True)


def test_sessions_have_kernels_of_their_own_under_one_name(registration: Registration) -> None:
    data = model(ONE_NODE, TWICE)
    added = [rows_kernel("k", lambda x, term=term: x + np.float32(term)) for term in (1, 2)]
    first, second = (open_model(data, registration, [kernel]) for kernel in added)
    alone = open_model(data, registration, [])  # no kernels: its body
    for _ in range(2):
        np.testing.assert_array_equal(run(first, rows(2))[0], rows(2) + 1)
        np.testing.assert_array_equal(run(second, rows(2))[0], rows(2) + 2)
        np.testing.assert_array_equal(run(alone, rows(2))[0], rows(2) * 2)


def test_outputs_have_the_shapes_that_symbols_give(registration: Registration) -> None:
    m = Size(1, (1,))
    shapes = [(N * m,), (Size(2, (0,)), m), (), (Size(1, (0, 0)), Size(3)), (Size(0), m)]
    op = FusedOp("k", (FLOAT, 7), tuple(FusedOutput(FLOAT, shape) for shape in shapes), ((0, 1), (1, 0)), N * m, 1, "")

    def compute(x: Any, y: Any) -> list[Any]:
        n, rest = x.shape[1], y.shape[0]
        sizes = [(n * rest,), (2 * n, rest), (), (n * n, 3), (0, rest)]
        return [np.full(size, x.sum() + y.sum(), np.float32) for size in sizes]

    kernel = host_kernel(op, compute, ((Size(2), N), (m,)))
    graph = (
        "(float[2, n] x, int64[m] z) => (float[a] o0, float[b, m] o1, float o2, float[c, 3] o3, float[d, m] o4)"
        " { o0, o1, o2, o3, o4 = fused.k (x, z) }"
    )
    session = open_model(model(graph), registration, [kernel])
    for n, rest in ((3, 5), (1, 1), (4, 2)):
        outputs = run(session, np.ones((2, n), np.float32), np.ones(rest, np.int64))
        assert [output.shape for output in outputs] == [(n * rest,), (2 * n, rest), (), (n * n, 3), (0, rest)]
        assert all((output == 2 * n + rest).all() for output in outputs)


def test_a_number_on_the_host_is_a_symbol(registration: Registration) -> None:
    """Sizes of results may depend on it; the kernel gets no address of it."""
    seen = []

    def host(pointers: Any, symbols: Any, programs: int) -> int:
        seen.append((pointers[0], pointers[1] is None, symbols[0], symbols[1], programs))
        return 0

    outputs = (FusedOutput(FLOAT, (N, Size(2, (1,)))),)
    op = FusedOp("k", (FLOAT, 7), outputs, ((0, 0), (1, ITSELF)), N * Size(1, (1,)), 1, "")
    graph = "(float[n] x, int64 z) => (float[n, m] y) { y = fused.k (x, z) }"
    session = open_model(model(graph), registration, [FusedKernel(op, host_code(host), None)])
    for n, number in ((3, 5), (1, 0), (4, 2)):
        (y,) = run(session, np.ones(n, np.float32), np.array(number))
        assert y.shape == (n, 2 * number)
    assert [one[1:] for one in seen] == [(True, 3, 5, 15), (True, 4, 2, 8)]
    assert all(address for address, *_ in seen)


@pytest.mark.parametrize(("inputs", "symbols"), [((FLOAT, 1), ((1, ITSELF),)), ((7,), ((0, ITSELF), (0, ITSELF)))])
def test_a_number_that_is_no_int64_or_there_twice_is_refused(inputs: Any, symbols: Any) -> None:
    op = FusedOp("k", inputs, (FusedOutput(FLOAT, ()),), symbols, Size(1), 1, "")
    with pytest.raises(ValueError, match="a number on the host is no int64, or is there twice"):
        FusedKernel(op, HostCode(1), None)


def test_an_empty_tensor_launches_nothing(registration: Registration) -> None:
    counted = Counted()
    session = open_model(model(ONE_NODE), registration, [rows_kernel("k", counted)])
    (y,) = run(session, rows(0))
    assert y.shape == (0, 4)
    assert counted.calls == 0
    assert run(session, rows(1))[0].shape == (1, 4)
    assert counted.calls == 1


@pytest.mark.parametrize("rounded", [1, 15, 16, 17, 33])
def test_programs_cover_the_count(registration: Registration, rounded: int) -> None:
    seen = []

    def host(pointers: Any, symbols: Any, programs: int) -> int:
        seen.append((symbols[0], programs))
        source, target = ((ctypes.c_float * symbols[0]).from_address(pointers[i]) for i in range(2))
        target[:] = [value + 1 for value in source]
        return 0

    kernel = FusedKernel(rows_op("k", 1), host_code(host), None)
    session = open_model(model(ONE_NODE.replace("4", "1")), registration, [kernel])
    (y,) = run(session, rows(rounded, 1))
    np.testing.assert_array_equal(y, rows(rounded, 1) + 1)
    assert seen == [(rounded, -(-rounded // 16))]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "double", "int64", "int32", "bool", "uint8", "int8"])
def test_a_kernel_gets_and_gives_elements_of_each_type(registration: Registration, dtype: str) -> None:
    number = ir.DataType[dtype.upper()]
    seen = []

    def flipped(x: Any) -> Any:
        seen.append(x.dtype)
        return x[::-1]

    op = FusedOp("k", (number,), (FusedOutput(number, (N,)),), ((0, 0),), N, 4, "")
    graph = (
        f"(float[n] x) => (float[n] y) {{ a = Cast <to = {int(number)}> (x) b = fused.k (a) y = Cast <to = 1> (b) }}"
    )
    session = open_model(model(graph), registration, [host_kernel(op, flipped, ((N,),))])
    x = np.array([0, 1, 1, 0, 1], np.float32) if dtype == "bool" else np.array([3, 1, 4, 1, 5], np.float32)
    np.testing.assert_array_equal(run(session, x)[0], x[::-1], strict=True)
    assert seen == [number.numpy()]


def test_an_input_of_another_type_is_refused_at_load(registration: Registration) -> None:
    graph = "(double[n, 4] x) => (float[n, 4] y) { y = fused.k (x) }"
    with pytest.raises(Exception, match=r"(?i)type.*double"):
        open_model(model(graph), registration, [rows_kernel("k", Counted())])


def test_an_input_with_too_few_dimensions_is_an_error_of_the_run(registration: Registration) -> None:
    op = FusedOp("short", (FLOAT,), (FusedOutput(FLOAT, (N,)),), ((0, 1),), N, 16, "")
    graph = "(float[n] x) => (float[n] y) { y = fused.short (x) }"
    kernel = host_kernel(op, lambda x: x, ((N,),))
    with pytest.raises(Exception, match="fused kernel short failed: input 0 has 1 dimensions"):
        run(open_model(model(graph), registration, [kernel]), np.ones(3, np.float32))


def test_two_threads_run_one_session(registration: Registration) -> None:
    graph = "(float[n, 4] x) => (float[n, 4] y) { a = fused.k (x) b = fused.k (a) y = fused.k (b) }"
    session = open_model(model(graph), registration, [rows_kernel("k", lambda x: x + np.float32(1))])
    barrier = threading.Barrier(2)

    def runs(count: int) -> bool:
        barrier.wait()
        return all((run(session, rows(count))[0] == rows(count) + 3).all() for _ in range(200))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(runs, (3, 8))) == [True, True]


def test_threads_of_onnx_runtime_run_kernels(registration: Registration) -> None:
    branches = " ".join(f"a{i} = fused.k (x) b{i} = fused.k (a{i})" for i in range(4))
    graph = f"(float[n, 4] x) => (float[n, 4] y) {{ {branches} y = Sum (b0, b1, b2, b3) }}"
    threads = set()

    def add(x: Any) -> Any:
        threads.add(threading.get_native_id())
        time.sleep(0.002)
        return x + np.float32(1)

    settings = onnxruntime().SessionOptions()
    settings.execution_mode = onnxruntime().ExecutionMode.ORT_PARALLEL
    settings.inter_op_num_threads = 3
    registration.register(settings, [rows_kernel("k", add)])
    session = onnxruntime().InferenceSession(model(graph), settings, providers=["CPUExecutionProvider"])
    for _ in range(20):
        np.testing.assert_array_equal(run(session, rows(2))[0], (rows(2) + 2) * 4)
    assert len(threads) > 1


def test_two_threads_register_their_own_kernels(registration: Registration) -> None:
    data = model(ONE_NODE)
    barrier = threading.Barrier(2)

    def opens(term: int) -> bool:
        kernel = rows_kernel("k", lambda x: x + np.float32(term))
        barrier.wait()
        sessions = [open_model(data, registration, [kernel]) for _ in range(20)]
        return all((run(session, rows(2))[0] == rows(2) + term).all() for session in sessions)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(opens, (1, 2))) == [True, True]


def test_an_error_number_of_the_host_is_an_exception_of_the_run(registration: Registration) -> None:
    kernel = FusedKernel(rows_op("broken"), host_code(lambda pointers, symbols, _: 7 * (symbols[0] == 2)), None)
    session = open_model(model(ONE_NODE.replace(".k", ".broken")), registration, [kernel])
    with pytest.raises(Exception, match="The fused kernel broken failed: the host function gave error 7"):
        run(session, rows(2))
    assert run(session, rows(3))[0].shape == (3, 4)


def test_memory_is_planned_anew_for_other_shapes(registration: Registration) -> None:
    nodes = " ".join(f"t{i + 1} = fused.k (t{i}) u{i} = Neg (t{i + 1}) s{i + 1} = Add (s{i}, u{i})" for i in range(6))
    graph = f"(float[n, 4] t0, float[n, 4] s0) => (float[n, 4] t6, float[n, 4] s6) {{ {nodes} }}"
    session = open_model(model(graph), registration, [rows_kernel("k", lambda x: x + np.float32(1))])
    for count in (3, 3, 3, 50, 50, 1, 3):
        x = rows(count)
        last, total = run(session, x, np.zeros_like(x))
        np.testing.assert_array_equal(last, x + 6)
        np.testing.assert_array_equal(total, -(6 * x + 21))


def test_a_session_outlives_another_one_with_its_kernels(registration: Registration) -> None:
    kernel = rows_kernel("k", lambda x: x + np.float32(1))
    first, second = (open_model(model(ONE_NODE), registration, [kernel]) for _ in range(2))
    run(first, rows(2))
    del first
    gc.collect()
    np.testing.assert_array_equal(run(second, rows(2))[0], rows(2) + 1)
    del second, kernel
    gc.collect()
    third = open_model(model(ONE_NODE), registration, [rows_kernel("k", lambda x: x - np.float32(1))])
    np.testing.assert_array_equal(run(third, rows(2))[0], rows(2) - 1)


def test_a_kernel_runs_in_a_branch(registration: Registration) -> None:
    graph = """(bool c, float[n, 4] x) => (float[n, 4] y) { y = If (c) <
        then_branch = a () => (float[n, 4] p) { p = fused.k (x) },
        else_branch = b () => (float[n, 4] q) { q = Neg (x) }> }"""
    session = open_model(model(graph), registration, [rows_kernel("k", Counted())])
    np.testing.assert_array_equal(run(session, np.array(True), rows(2))[0], rows(2) * 2)
    np.testing.assert_array_equal(run(session, np.array(False), rows(2))[0], -rows(2))


@pytest.mark.parametrize(
    "op",
    [
        FusedOp("k", (FLOAT,), (), ((0, 0),), N, 1, ""),
        FusedOp("k", (FLOAT,), (FusedOutput(FLOAT, (N,)),), ((1, 0),), N, 1, ""),
        FusedOp("k", (FLOAT,), (FusedOutput(FLOAT, (N,)),), ((0, -1),), N, 1, ""),
        FusedOp("k", (FLOAT,), (FusedOutput(FLOAT, (Size(1, (1,)),)),), ((0, 0),), N, 1, ""),
        FusedOp("k", (FLOAT,), (FusedOutput(FLOAT, (N,)),), (), N, 1, ""),
        FusedOp("k", (FLOAT,), (FusedOutput(FLOAT, (N,)),), ((0, 0),), N, 0, ""),
        FusedOp("k", (FLOAT,), (FusedOutput(FLOAT, (N,) * 33),), ((0, 0),), N, 1, ""),
    ],
)
def test_an_operator_that_refers_to_nothing_is_refused(op: FusedOp) -> None:
    with pytest.raises(ValueError, match=r"^k: "):
        FusedKernel(op, HostCode(1), None)
