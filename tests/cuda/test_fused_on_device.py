"""Fused kernels inside sessions compute the same as their NumPy functions.

On a CUDA device by cubins; on the CPU by their NumPy form, which shows that the comparison itself is right.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from fused_on_cpu import fused_on_the_cpu
from generated_graphs import GraphMaker, as_numpy, as_torch, inputs_of
from test_fuse_kernels import GRADIENT, HEADER, JOINED, LOSS, assert_same, cross_entropy, fused, with_kernels
from test_own_kernels import arrays, integer_graph

from ort_dynamo.compilation.probe_kernels import kernels_work
from ort_dynamo.graph.build import built_of
from ort_dynamo.graph.fused_op import DOMAIN
from ort_dynamo.options.groups import CacheOptions, SessionOptions
from ort_dynamo.passes.onnx.fuse_kernels import fused_ops
from ort_dynamo.runtime.compiled_graph import CompiledGraph, open_graph
from ort_dynamo.runtime.installed.providers import find_target

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def opened(model: ir.Model, device: str) -> CompiledGraph:
    """A session that runs the kernels of a model on a device."""
    settings = SessionOptions(graph_optimization="disable").resolved()
    with fused_on_the_cpu() if device == "cpu" else nullcontext():
        built = built_of("kernels", model, settings, fused_ops(model))
        return open_graph(built, find_target(device), torch.device(device))


def assert_right(
    model: ir.Model, inputs: dict[str, np.ndarray[Any, Any]], device: str, moved: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Compare a model's results on a device with those of the functions, by ONNX's reference."""
    assert any(node.domain == DOMAIN for node in model.graph)
    given = [moved(as_torch(inputs[str(one.name)]).to(device)) for one in model.graph.inputs]
    results = opened(model, device)(*given)
    found = {str(one.name): as_numpy(result) for one, result in zip(model.graph.outputs, results, strict=True)}
    is_half = any(value.dtype in HALVES for node in model.graph for value in (*node.inputs, *node.outputs) if value)
    with np.errstate(all="ignore"):
        assert_same(found, with_kernels(model, inputs, body=True), 2e-2 if is_half else 2e-5)


HALVES = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def where_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def one_element_on(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose address is no multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view(tensor.shape).copy_(tensor)


def runs_on_the_cpu(model: ir.Model) -> bool:
    """Check whether the unfused nodes have kernels on the CPU; those of half dtypes have none."""
    left = (node for node in model.graph if node.domain != DOMAIN)
    moves = {"Reshape", "Transpose", "Cast", "Concat", "Slice", "Split", "Unsqueeze", "Squeeze", "Expand"}
    return all(
        node.op_type in moves or not any(value.dtype in HALVES for value in node.inputs if value is not None)
        for node in left
    )


@pytest.mark.parametrize("moved", [where_it_is, one_element_on], ids=lambda moved: moved.__name__)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(8))
def test_integers_are_exact(seed: int, device: str, moved: Any) -> None:
    model = fused(integer_graph(seed))
    inputs = arrays(model, seed)
    given = [moved(as_torch(inputs[str(one.name)]).to(device)) for one in model.graph.inputs]
    expected = with_kernels(model, inputs, body=True)
    for one, result in zip(model.graph.outputs, opened(model, device)(*given), strict=True):
        np.testing.assert_array_equal(as_numpy(result), expected[str(one.name)])


@pytest.mark.parametrize("moved", [where_it_is, one_element_on], ids=lambda moved: moved.__name__)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(24))
def test_the_kernels_of_a_generated_graph(seed: int, device: str, moved: Any) -> None:
    plain = GraphMaker(seed, symbolic=bool(seed % 2)).model()
    model = fused(plain)
    if not any(node.domain == DOMAIN for node in model.graph) or (device == "cpu" and not runs_on_the_cpu(model)):
        pytest.skip("nothing is fused, or the CPU has no kernels for the rest")
    assert_right(model, inputs_of(plain, seed, {"rows": 5}), device, moved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [50, 8192, 20000])
@pytest.mark.parametrize("text", [LOSS, GRADIENT], ids=["loss", "gradient"])
def test_cross_entropies(text: str, width: int, device: str) -> None:
    plain, inputs = cross_entropy(text, width)
    assert_right(fused(plain), inputs, device, where_it_is)


@pytest.mark.parametrize("device", DEVICES)
def test_joined_gradients_and_their_columns(device: str) -> None:
    plain = onnx.parser.parse_model(HEADER + JOINED)
    assert_right(fused(plain), inputs_of(plain, 0, {}), device, where_it_is)


@pytest.mark.cuda
def test_results_repeat_bit_for_bit() -> None:
    plain = onnx.parser.parse_model(HEADER + JOINED)
    model = fused(plain)
    given = [as_torch(one).cuda() for one in inputs_of(plain, 0, {}).values()]
    run = opened(model, "cuda")
    first = [one.clone() for one in run(*given)]
    for _ in range(20):
        assert all(torch.equal(one, again) for one, again in zip(first, run(*given), strict=True))


@pytest.mark.cuda
def test_a_session_waits_for_its_stream_and_is_waited_for() -> None:
    plain, inputs = cross_entropy(LOSS, 20000)
    model = fused(plain)
    run = opened(model, "cuda")
    given = [as_torch(inputs[str(one.name)]).cuda() for one in model.graph.inputs]
    expected = [one.clone() for one in run(*given)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = [torch.zeros_like(one).copy_(one) for one in given]
        results = run(*late)
        sums = [one.float().sum() for one in results]
    stream.synchronize()
    for one, right in zip(sums, expected, strict=True):
        torch.testing.assert_close(one, right.float().sum())


@pytest.mark.cuda
def test_the_kernel_probe_succeeds() -> None:
    assert kernels_work(CacheOptions())
