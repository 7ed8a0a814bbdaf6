"""Tests of training files of torch.onnx.export: as the model that was exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exported_models import EXPORTS, OPTIMIZED, export_model, run_onnxruntime
from torch._dynamo.utils import counters

from ort_dynamo.onnx_module import OnnxModule, to_model_proto
from ort_dynamo.testing import assert_close

pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

DEFAULT = ("bert", "gpt2", "resnet")


def some(names: tuple[str, ...], default: tuple[str, ...] = DEFAULT) -> list[Any]:
    return [pytest.param(name, marks=[] if name in default else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", some(EXPORTS + OPTIMIZED))
@pytest.mark.parametrize("rows", [2, 3])
def test_a_forward_is_that_of_onnxruntime(name: str, rows: int) -> None:
    one = export_model(name)
    inputs = one.batch(rows)
    (found,) = OnnxModule(one.model).eval()(*inputs)
    (expected,) = run_onnxruntime(one.model, inputs)
    assert_close(found.detach(), torch.from_numpy(expected), name, strides=False)


@pytest.mark.parametrize("name", some(EXPORTS))
def test_gradients_are_those_of_the_model_it_was_exported_from(name: str) -> None:
    one = export_model(name)
    inputs = one.batch(3)
    module = OnnxModule(one.model).eval()
    for model in (module, one.source):
        model.zero_grad()
        found = model(*inputs)
        (found[0] if isinstance(found, tuple) else found).square().sum().backward()
    assert _gradients(module, module.onnx_names) == pytest.approx(_gradients(one.source, None), rel=1e-4, abs=1e-5)


def _gradients(module: torch.nn.Module, names: Any) -> dict[str, float]:
    """The norm of each parameter's gradient, of tied ones under one name."""
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        kept = name.replace("transformer.wte", "lm_head") if names is None else names[name]
        found[kept.replace("transformer.wte", "lm_head")] = float(parameter.grad.norm())
    return found


@pytest.mark.parametrize("name", some(EXPORTS))
def test_dynamo_traces_it_into_one_graph_of_open_batch_size(name: str) -> None:
    one = export_model(name)
    module = OnnxModule(one.model).eval()
    compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=True)
    for rows in (5, 4):  # 3 would be the number of channels, which Dynamo takes for the same size
        inputs = one.batch(rows)
        assert_close(compiled(*inputs)[0].detach(), module(*inputs)[0].detach(), name, strides=False)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", some(EXPORTS + OPTIMIZED))
def test_all_that_it_makes_is_on_the_device_of_its_weights(name: str) -> None:
    one = export_model(name)
    inputs = one.batch(3)
    module = OnnxModule(one.model).eval()
    shape = module(*inputs)[0].shape
    (found,) = module.to("meta")(*[value.to("meta") for value in inputs])
    assert found.is_meta
    assert found.shape == shape


@pytest.mark.parametrize("name", some(EXPORTS, ("gpt2",)))
def test_it_trains_on_onnxruntime_as_its_source_does_in_eager(name: str) -> None:
    one = export_model(name)
    module = OnnxModule(one.model).eval()
    compiled = torch.compile(module, backend="ort_train", fullgraph=True, dynamic=True)
    state = {name: value.clone() for name, value in one.source.state_dict().items()}
    inputs = one.batch(3)
    losses = []
    for model, trained in ((compiled, module), (one.source, one.source)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-2)
        steps = []
        for _ in range(3):
            found = model(*inputs)
            loss = (found[0] if isinstance(found, tuple) else found).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(float(loss))
        losses.append(steps)
    one.source.load_state_dict(state)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    (saved,) = run_onnxruntime(to_model_proto(module), inputs)
    assert_close(module(*inputs)[0].detach(), torch.from_numpy(saved), "the saved file", strides=False)
