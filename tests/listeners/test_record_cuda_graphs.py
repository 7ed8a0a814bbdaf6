"""mode="reduce-overhead" records graphs as CUDA graphs, or refuses them with a reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_streams import FakeCuda, fake_cuda
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ort_dynamo
from ort_dynamo.backend import ort_train
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.listeners import record_cuda_graphs
from ort_dynamo.listeners.record_cuda_graphs import why_not_recorded
from ort_dynamo.runtime import session, streams
from ort_dynamo.runtime.torch_memory import TORCH_MEMORY
from ort_dynamo.testing import patch_facts
from ort_dynamo.torch_internals import cuda_graphs

CUDA = torch.device("cuda", 0)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def trains(step: Callable[..., Tensor], module: nn.Module, rows: int = 4) -> None:
    x = torch.randn(rows, 3)
    module.zero_grad()
    step(x).square().sum().backward()
    ours = [parameter.grad for parameter in module.parameters()]
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_on_the_cpu_there_is_nothing_to_record() -> None:
    module = model()
    trains(torch.compile(module, backend="ort_train", mode="reduce-overhead"), module)
    assert not counters["ort_train_not_recorded"]
    assert counters["ort_train"]["eager_nodes"] == 0


@pytest.fixture
def like_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The CPU, taken for a device with streams, whose sessions may be recorded."""
    streams._stream_apart.cache_clear()
    patch_facts(monkeypatch, computes_on_streams=True)
    monkeypatch.setattr(TORCH_MEMORY, "serves", lambda _: False)
    monkeypatch.setattr(record_cuda_graphs, "has_graph_trees", lambda: True)
    add = session.onnxruntime().SessionOptions.add_session_config_entry

    def allowed(settings: Any, name: str, value: str) -> None:
        if name != "session.disable_cpu_ep_fallback":  # here all is the CPU's
            add(settings, name, value)

    monkeypatch.setattr(session.onnxruntime().SessionOptions, "add_session_config_entry", allowed)
    CACHE.clear()
    with fake_cuda(monkeypatch) as fake:
        yield fake
    streams._stream_apart.cache_clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the requests to torch's graph trees; a fake of theirs returns the function itself."""
    asked: list[dict[str, Any]] = []

    def cudagraphify(run: Any, inputs: list[Any], resting: tuple[int, ...], **rest: Any) -> Any:
        asked.append({"resting": resting, "count": len(inputs), **rest})
        return lambda given: run(given)

    monkeypatch.setattr(
        cuda_graphs, "_trees", lambda name: cudagraphify if name == "cudagraphify_impl" else lambda: None
    )
    return asked


def test_forward_and_backward_are_recorded_on_a_stream_of_their_own(
    like_cuda: FakeCuda, made: list[dict[str, Any]]
) -> None:
    module = model()
    trains(torch.compile(module, backend="ort_train", mode="reduce-overhead"), module)
    forward, backward = sorted(made, key=lambda one: bool(one["is_backward"]))
    assert (forward["is_backward"], forward["is_inference"]) == (False, False)
    assert len(forward["resting"]) == 4, "the parameters are not copied, the batch is"
    assert forward["count"] == 5
    assert backward["is_backward"]
    assert backward["resting"] == tuple(range(backward["count"] - 1)), "all but the result's gradient"
    assert "101 waits for 0" in like_cuda.notes
    assert "0 waits for 101" in like_cuda.notes
    assert not counters["ort_train_not_recorded"]


def test_dynamic_shapes_are_refused_with_the_reason(
    like_cuda: FakeCuda, made: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    module = model()
    compiled = torch.compile(module, backend="ort_train", mode="reduce-overhead", dynamic=True)
    with caplog.at_level(logging.WARNING, "ort_dynamo"):
        trains(compiled, module)
    assert made == []
    forward, backward = counters["ort_train_not_recorded"]
    assert "forward: the sizes of" in forward
    assert "are dynamic" in forward
    assert "backward: its forward is not recorded" in backward
    assert "a forward graph runs without a CUDA graph" in caplog.text
    said = str(ort_dynamo.summary())
    assert "without a CUDA graph, though asked for:\n  1 x forward: the sizes of" in said


def test_a_session_with_a_node_on_the_cpu_is_refused_and_runs(
    like_cuda: FakeCuda, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = session.onnxruntime().InferenceSession
    asked: list[bool] = []

    def checked(*given: Any, **named: Any) -> Any:
        asked.append(len(asked) == 0)
        if asked[-1]:
            raise RuntimeError(
                "This session contains graph nodes that are assigned to the default CPU EP, but fallback"
            )
        return real(*given, **named)

    monkeypatch.setattr(session.onnxruntime(), "InferenceSession", checked)
    module = model()
    trains(torch.compile(module, backend="ort_train", mode="reduce-overhead"), module)
    reasons = list(counters["ort_train_not_recorded"])
    assert any("to the CPU" in reason for reason in reasons)
    assert len(made) < 2


def test_dynamos_reset_frees_recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def trees(name: str) -> Any:
        if name == "cudagraphify_impl":
            return lambda run, *_, **__: lambda inputs: run(inputs)
        return lambda: asked.append(name)

    cuda_graphs.forget_recordings()
    monkeypatch.setattr(cuda_graphs, "_trees", trees)
    gm = traced(lambda x: (x.sin(),), (2,))
    cuda_graphs.recorded(lambda inputs: [inputs.pop().sin()], gm, "inference", CUDA, (), ())
    for _ in range(2):
        ort_train.reset()  # type: ignore[attr-defined]  # Dynamo's reset calls it where it has been used
    assert asked == ["reset_cudagraph_trees"]


def test_a_backward_that_is_not_recorded_tells_the_trees_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Manager:
        def set_to_running_backward(self) -> None:
            told.append("backward")

    monkeypatch.setattr(cuda_graphs, "_trees", lambda name: lambda index, create_if_none_exists: Manager())
    run = cuda_graphs.running_backward(lambda inputs: told.append(inputs), CUDA)
    run([1])
    assert told == ["backward", [1]]
    assert run._boxed_call  # type: ignore[attr-defined]


# -- reasons -----------------------------------------------------------------------------------------------------------


def traced(function: Callable[..., Any], *shapes: tuple[int, ...], device: torch.device = CUDA) -> torch.fx.GraphModule:
    """The graph of a function of CUDA tensors, where there may be none."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    gm = make_fx(function, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes))
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            node.meta["val"] = FakeTensor(mode, meta, device)
    return gm


def test_graph_of_kernel_launches_can_be_recorded() -> None:
    assert why_not_recorded(traced(lambda x: x.sin() + 1, (2, 3)), ()) is None


def test_a_tensor_on_the_cpu_cannot() -> None:
    gm = traced(lambda x, y: x + y, (2, 3), ())
    first, second = gm.graph.find_nodes(op="placeholder")
    second.meta["val"] = FakeTensor(first.meta["val"].fake_mode, torch.empty((), device="meta"), torch.device("cpu"))
    reason = why_not_recorded(gm, ())
    assert reason is not None
    assert f"{second.name} on cpu" in reason


def test_graph_that_waits_for_the_device_cannot_be_recorded() -> None:
    gm = traced(lambda x: x.sin(), (2, 3))
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    node.meta["val"] = node.meta["val"].fake_mode.shape_env.create_unbacked_symint()
    reason = why_not_recorded(gm, ())
    assert reason is not None
    assert "waits for the device" in reason


def test_a_batch_that_is_written_to_cannot_but_a_buffer_can() -> None:
    gm = traced(lambda x: x.add_(1), (2, 3))
    reason = why_not_recorded(gm, ())
    assert reason is not None
    assert "writes to an input" in reason
    assert why_not_recorded(gm, (0,)) is None


def test_the_installed_torchs_graph_trees_accept_our_arguments() -> None:
    assert cuda_graphs.has_graph_trees()
    replayed = cuda_graphs.recorded(
        lambda inputs: [inputs.pop().sin()], traced(lambda x: (x.sin(),), (2,)), "inference", CUDA, (), ()
    )
    assert callable(replayed)
