"""Tests, without a GPU, that each operator and each node of the benchmarks' models has a CUDA kernel.

The kernels are those of the records (.ci/record_kernels.py). Exceptions are listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from cuda_target import autocast, compiled_for, kernels_lacking
from torch import Tensor

from bench.workloads import WORKLOADS, build
from ort_dynamo.runtime.installed.providers import recorded_cuda_targets
from ort_dynamo.targets.target import Target

TARGETS = recorded_cuda_targets()
STOCK = TARGETS[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.version)
@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_every_node_of_a_model_has_a_kernel(placement: str, target: Target, name: str, dtype: torch.dtype) -> None:
    workload = build(name, "tiny")
    with compiled_for(target, placement=placement) as (backend, found), autocast(dtype):
        torch.compile(workload.module, backend=backend, fullgraph=True)(*workload.batch)
    if placement == "fastest":
        assert not found.eager
    else:
        assert all("flash_attention" in overload for overload in found.eager), "whose generator's state is torch's"
        assert found.eager or len(found.models) == 2, "a forward and a backward, each one session"
    for model in found.models:
        assert not kernels_lacking(model, target)


def looked_up(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table).sum() + table.gather(0, index).sum()


def loss(logits: Tensor, index: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1), index[:, 0])


@pytest.mark.parametrize("function", [looked_up, loss])
def test_checked_indices_use_only_operators_with_cuda_kernels(function: Callable[..., Tensor]) -> None:
    table, index = torch.randn(4, 3, requires_grad=True), torch.tensor([[0, 1, 2]] * 4)
    with compiled_for(STOCK) as (backend, found):
        torch.compile(function, backend=backend, fullgraph=True)(table, index)
    assert not found.eager
    assert "BitwiseAnd" not in {node.op_type for model in found.models for node in model.graph.node}
    assert not STOCK.has_op("BitwiseAnd")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.searchsorted(x[:0, 0].contiguous(), x[0]),
        lambda x: torch.linalg.vecdot(x[:, :0], x[:, :0]),
        lambda x: x[:0].tril(),
        lambda x: x[x > 0].sum(),
        lambda x: (x[x > 0] * 2).mean(),
    ],
)
def test_possibly_empty_tensors_are_not_reduced_in_a_session(function: Callable[..., Tensor]) -> None:
    patched: Any = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with patched, compiled_for(STOCK) as (backend, found):
        torch.compile(function, backend=backend, fullgraph=True)(torch.randn(4, 3))
    used = {node.op_type for model in found.models for node in model.graph.node}
    assert not any(op_type.startswith("Reduce") or op_type == "Trilu" for op_type in used)


def test_nonempty_tensors_are_reduced_in_a_session() -> None:
    with compiled_for(STOCK, placement="onnxruntime") as (backend, found):
        torch.compile(lambda x: x.sum(1) + 1, backend=backend, fullgraph=True, dynamic=True)(torch.randn(4, 3))
    assert not found.eager
    assert "ReduceSum" in {node.op_type for model in found.models for node in model.graph.node}


def test_a_node_without_a_kernel_is_seen() -> None:
    model = onnx.parser.parse_model(MODEL)
    assert kernels_lacking(model, STOCK) == {"BitwiseAnd, T=INT64": 1}


MODEL = """<ir_version: 9, opset_import: ["": 20]>
test (int64[2] x, float[2] y) => (int64[2] z, float[2] w) { z = BitwiseAnd (x, x)  w = Relu (y) }"""
