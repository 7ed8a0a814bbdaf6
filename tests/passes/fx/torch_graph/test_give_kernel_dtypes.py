"""Statistics of normalizations in half types, where torch runs the operator, its gradient, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import CHOSEN
from ort_dynamo.passes import pipelines
from ort_dynamo.passes.fx.torch_graph.give_kernel_dtypes import GiveKernelDtypes
from ort_dynamo.passes.fx.torch_graph.mark_chosen import choose
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.segment import probe_lowering
from ort_dynamo.testing import TOLERANCES, assert_like_eager, eager_reasons

pytestmark = pytest.mark.default_placement

Capture = Callable[..., GraphModule]

NORMALIZATIONS: dict[str, Callable[..., Tensor]] = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "batch, running": lambda x, w, b: F.batch_norm(x, w.detach() * 0.5, b.detach() * 0.5, w, b, training=True),
    "batch, evaluated": lambda x, w, b: F.batch_norm(x, b.detach() * 0.5, w.detach() * 2, w, b),
    "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "layer": lambda x, w, b: F.layer_norm(x, (4,), w, b),
    "group": lambda x, w, b: F.group_norm(x, 2, w, b),
}


def is_forward(node: Node) -> bool:
    return "_norm" in str(node.target) and "backward" not in str(node.target)


def is_gradient(node: Node) -> bool:
    return "_norm_backward" in str(node.target)


CHOICES: dict[str, Callable[[Node], bool]] = {
    "forward": is_forward,
    "gradient": is_gradient,
    "both": lambda node: is_forward(node) or is_gradient(node),
}


@ordering(gives=[Condition.PLACED])  # in the place of PlaceSlowerOperators
class Choose(PassBase):
    def __init__(self, wanted: Callable[[Node], bool]) -> None:
        super().__init__()
        self.wanted = wanted

    def call(self, graph_module: GraphModule) -> PassResult:
        found = [node for node in graph_module.graph.nodes if self.wanted(node)]
        assert not found or choose(found, "the test wants it")
        return PassResult(graph_module, bool(found))


def tensors(dtype: torch.dtype, parameters: str) -> tuple[Tensor, Tensor, Tensor]:
    """An image, and parameters of channels that are four, as its last dimension is."""
    of = torch.float32 if parameters == "float32" else dtype
    x = torch.randn(3, 4, 5, 4, dtype=dtype, requires_grad=True)
    return x, torch.rand(4, dtype=of).add(0.5).requires_grad_(), torch.randn(4, dtype=of, requires_grad=True)


def every_exchange(test: Callable[..., None]) -> Callable[..., None]:
    for argument, values in (
        ("name", NORMALIZATIONS),
        ("choice", CHOICES),
        ("dtype", [torch.bfloat16, torch.float16]),
        ("parameters", ["half", "float32"]),
    ):
        test = pytest.mark.parametrize(argument, values, ids=str)(test)
    return test


def assert_exchanged(name: str, dtype: torch.dtype, parameters: str, **given: Any) -> None:
    """Compare a normalization between two functions, and the gradients, with eager's."""
    x, w, b = tensors(dtype, parameters)
    assert_like_eager(
        lambda x, w, b: NORMALIZATIONS[name](x.sin(), w, b).cos(), *(x, w, b), tolerance=TOLERANCES[dtype], **given
    )


@every_exchange
def test_torch_and_sessions_exchange_statistics(
    name: str, choice: str, dtype: torch.dtype, parameters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "PlaceSlowerOperators", lambda *_: Choose(CHOICES[choice]))
    assert_exchanged(name, dtype, parameters, options={"debug": {"verify": True}})
    assert not eager_reasons()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_session_reads_new_running_statistics_of_torchs(
    name: str, dtype: torch.dtype, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics have a half type, and fake tensors say float32."""
    monkeypatch.setattr(pipelines, "PlaceSlowerOperators", lambda *_: Choose(is_forward))

    def function(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        mean, variance = mean * 1, variance * 1
        y = getattr(F, name)(x, mean, variance, **({"training": True} if name == "batch_norm" else {}))
        return torch.sin(y + mean[:, None, None] * variance[:, None, None])

    x = torch.randn(3, 4, 5, 4, dtype=dtype, requires_grad=gradients)
    assert_like_eager(function, x, torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype), gradients=gradients)
    assert not eager_reasons()


@every_exchange
def test_torch_and_sessions_exchange_statistics_where_no_session_takes_one(
    name: str, choice: str, dtype: torch.dtype, parameters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(node: Node, **given: Any) -> str | None:
        reason = refusal(node, **given)
        return "the test refuses it" if CHOICES[choice](node) else reason

    refusal = probe_lowering.refusal
    monkeypatch.setattr(probe_lowering, "refusal", refused)
    options = {"placement": "onnxruntime", "debug": {"verify": True}}
    assert_exchanged(name, dtype, parameters, options=options, allow_eager=True)
    assert eager_reasons()


def statistics(gm: GraphModule) -> list[torch.dtype]:
    (forward,) = filter(is_forward, gm.graph.nodes)
    (backward,) = filter(is_gradient, gm.graph.nodes)
    read = [node.meta["val"].dtype for node in backward.args if isinstance(node, Node)][2:4]
    assert read == [fake.dtype for fake in forward.meta["val"][1:3]]
    return read


def test_only_operators_in_torch_are_marked(joint_graph: Capture) -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    gm = joint_graph(lambda x: F.group_norm(x, 2).sum(), x)
    assert not run_twice(GiveKernelDtypes(), gm)
    assert statistics(gm) == [torch.float32] * 2
    (gradient,) = filter(is_gradient, gm.graph.nodes)
    gradient.meta[CHOSEN] = "the test wants it"
    assert run_twice(GiveKernelDtypes(), gm)
    assert statistics(gm) == [torch.bfloat16] * 2


def test_float32_statistics_of_torchs_kernel_stay(joint_graph: Capture) -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    gm = joint_graph(lambda x: F.layer_norm(x, (4,), torch.ones(4)).sum(), x)
    for node in gm.graph.nodes:
        node.meta[CHOSEN] = "the test wants it"
    assert not run_twice(GiveKernelDtypes(), gm)
    assert statistics(gm) == [torch.float32] * 2
