"""Saved models with fused kernels are standard ONNX: a runtime without the kernels runs the model's functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest
import torch
from cuda_forms import cuda_forms
from fused_on_cpu import open_with_kernels
from torch import nn

from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.graph.fused_op import DOMAIN
from ort_dynamo.lowering import build_island
from ort_dynamo.passes.onnx.fused_kernels.kernel import Kernel
from ort_dynamo.passes.onnx.lower_opset import LowerOpset
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.runtime.session import optimize
from ort_dynamo.saving.one_model import join_models

pytestmark = pytest.mark.default_placement

Arrays = dict[str, np.ndarray]
Saved = tuple[Path, dict[str, Kernel]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The folder of a compile's models, and its kernels."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 8), nn.SiLU(), nn.Softmax(-1))

    def on_the_cpu(built: BuiltGraph, *_: object) -> bytes:
        return optimize(built, find_target("cpu"), torch.device("cpu"))

    with pytest.MonkeyPatch.context() as patch, cuda_forms(fused=True) as found:
        patch.setattr(build_island, "optimize", on_the_cpu)
        run = torch.compile(
            net, backend="ort_train", options={"save_onnx": str(folder), "debug": {"contrib_ops": False}}
        )
        run(torch.randn(4, 8)).square().sum().backward()
    return folder, found.kernels


def models(folder: Path, stage: str) -> list[onnx.ModelProto]:
    return [onnx.load(path) for path in sorted(folder.glob({"rewritten": "*.onnx", "optimized": "optimized/*"}[stage]))]


def inputs_of(model: onnx.ModelProto) -> Arrays:
    random = np.random.default_rng(0)
    shapes = {one.name: [size.dim_value for size in one.type.tensor_type.shape.dim] for one in model.graph.input}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def in_a_plain_session(model: onnx.ModelProto, inputs: Arrays) -> list[np.ndarray]:
    session = onnxruntime().InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def by_onnx(model: onnx.ModelProto, inputs: Arrays) -> list[np.ndarray]:
    return onnx.reference.ReferenceEvaluator(model).run(None, inputs)


@pytest.mark.parametrize("stage", ["rewritten", "optimized"])
def test_a_session_with_and_without_kernels_computes_the_same(saved: Saved, stage: str) -> None:
    folder, kernels = saved
    found = models(folder, stage)
    assert len(found) == 2
    for model in found:
        onnx.checker.check_model(model, full_check=True)
        assert {node.op_type for node in model.graph.node if node.domain == DOMAIN} == {f.name for f in model.functions}
        assert model.functions
        inputs = inputs_of(model)
        ours = open_with_kernels(model, kernels).run(None, inputs)
        for one, other in zip(ours, in_a_plain_session(model, inputs), strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-5)


def test_the_reference_evaluator_computes_the_same(saved: Saved) -> None:
    for model in models(saved[0], "rewritten"):
        inputs = inputs_of(model)
        for one, other in zip(by_onnx(model, inputs), in_a_plain_session(model, inputs), strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-5)


def lowered(model: ir.Model) -> ir.Model:
    LowerOpset(17)(model)
    assert not model.functions
    return model


@pytest.mark.parametrize("change", [lambda model: model, lowered], ids=["joined", "joined, of opset 17"])
def test_both_halves_are_joined(saved: Saved, change: Callable[[ir.Model], ir.Model]) -> None:
    (described,) = saved[0].glob("*.json")
    fused, plain = (ir.to_proto(change(join_models(described, stage))) for stage in ("rewritten", "lowered"))
    onnx.checker.check_model(fused, full_check=True)
    inputs = inputs_of(fused)
    for one, other in zip(in_a_plain_session(fused, inputs), in_a_plain_session(plain, inputs), strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)
