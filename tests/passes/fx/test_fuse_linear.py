"""Graph before, graph after: which products that torch runs become linear layers of oneDNN's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_twice import run_twice
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.passes.fx import fuse_linear
from ort_dynamo.passes.fx.fuse_linear import FuseLinear
from ort_dynamo.torch_internals.processor import is_x86
from ort_dynamo.torch_internals.pytree import tree_leaves

pytestmark = pytest.mark.skipif(
    not (is_x86() and torch.backends.mkldnn.is_available()), reason="oneDNN's linear layers were measured on x86 alone"
)

LAYER = "mkldnn._linear_pointwise.default"


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_linear, "_LEAST", 1)


def rewritten(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """The targets after the pass; the graph must compute the same."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    (output,) = gm.graph.find_nodes(op="output")
    strides = [node.meta["val"].stride() for node in output.all_input_nodes]
    run_twice(FuseLinear(), gm)
    torch.testing.assert_close(gm(*inputs), function(*inputs))
    assert [one.stride() for one in tree_leaves(gm(*inputs))] == strides
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


torch.manual_seed(0)
X, W, B = torch.randn(16, 8), torch.randn(12, 8), torch.randn(12)


def test_a_layer_is_one_call() -> None:
    assert rewritten(F.linear, X, W, B) == [LAYER]


def test_a_gelu_is_taken_along() -> None:
    assert rewritten(lambda x, w, b: F.gelu(F.linear(x, w, b)), X, W, B) == [LAYER]


def test_through_views() -> None:
    given = X.view(4, 4, 8)
    targets = rewritten(lambda x, w, b: F.gelu(F.linear(x, w, b)), given, W, B)
    assert targets in (  # torch 2.15 traces a linear layer with the second
        ["aten.view.default", LAYER, "aten.view.default"],
        ["aten.view.default", LAYER, "aten._unsafe_view.default"],
    )


def test_its_values_are_those_of_torchs_gelu() -> None:
    given = torch.cat([X * 1e-20, X, X * 1e3, torch.tensor([[float("nan")], [float("inf")], [1e38]]).expand(3, 8)])
    product = torch.ops.mkldnn._linear_pointwise(given, W, B, "none", [], "")
    fused = torch.ops.mkldnn._linear_pointwise(given, W, B, "gelu", [], "none")
    torch.testing.assert_close(fused, F.gelu(product), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "after",
    [
        torch.relu,
        torch.sigmoid,
        lambda y: F.gelu(y, approximate="tanh"),
        lambda y: F.gelu(y.t()),
        lambda y: F.gelu(y[:8]),
    ],
)
def test_another_activation_and_another_view_stay(after: Callable[[Tensor], Tensor]) -> None:
    targets = rewritten(lambda x, w, b: after(F.linear(x, w, b)), X, W, B)
    assert targets[0] == LAYER
    assert len(targets) > 1


def test_a_gelu_stays_where_the_layers_result_is_read_too() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w, b)
        return F.gelu(y), y

    assert rewritten(function, X, W, B) == [LAYER, "aten.gelu.default"]


def test_so_it_does_where_a_view_of_it_is() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w, b).view(-1)
        return F.gelu(y), y * 2

    assert rewritten(function, X, W, B)[0] == LAYER
    assert "aten.gelu.default" in rewritten(function, X, W, B)


def test_a_transposed_weight_that_something_else_reads_stays() -> None:
    targets = rewritten(lambda x, w, b: (F.linear(x, w, b), w.t()), X, W, B)
    assert LAYER in targets
    assert "aten.t.default" in targets


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(lambda x, w, b: torch.addmm(b, x, w), (X, W.t().contiguous(), B), id="weight as it is"),
        pytest.param(lambda x, w, b: torch.addmm(b, x, w.t()), (X, W, B[:1]), id="one bias for all columns"),
        pytest.param(lambda x, w, b: torch.addmm(b, x, w.t()), (X, W, torch.randn(16, 12)), id="a sum of matrices"),
        pytest.param(lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2), (X, W, B), id="scaled"),
        pytest.param(lambda x, w, b: torch.addmm(b, x, w.t(), beta=2), (X, W, B), id="bias scaled"),
        pytest.param(F.linear, (X.t().contiguous().t(), W, B), id="columns"),
        pytest.param(F.linear, (X, W.t().contiguous().t(), B), id="weight of columns"),
        pytest.param(F.linear, (X.double(), W.double(), B.double()), id="float64"),
        pytest.param(F.linear, (X.bfloat16(), W.bfloat16(), B.bfloat16()), id="bfloat16"),
    ],
)
def test_what_is_no_layer_of_float32_stays(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    assert LAYER not in rewritten(function, *inputs)


def test_small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert LAYER not in rewritten(F.linear, X, W, B)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_the_users_switch_is_obeyed() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        assert LAYER not in rewritten(F.linear, X, W, B)
