"""Graph before, graph after: which of torch's nodes write over an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.passes.fx.torch_graph.write_in_place import WriteInPlace
from ort_dynamo.passes.running import run_passes
from ort_dynamo.segment.segment import segment
from ort_dynamo.torch_internals.operators import aten


def outer(function: Callable[..., Any], *inputs: Tensor, islands: tuple[Any, ...] = ()) -> GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*inputs)

    def refuse(node: Node) -> str | None:
        return None if node.target in islands else "torch's"

    return segment(gm, refuse, torch.device("cpu")).gm


def targets(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op in ("call_function", "call_module")]


def rewritten(function: Callable[..., Any], *inputs: Tensor, islands: tuple[Any, ...] = ()) -> GraphModule:
    """The outer graph after the pass, which has computed the same and left its inputs as they were."""
    gm = outer(function, *inputs, islands=islands)
    run_passes([WriteInPlace()], gm, check=True)
    (again,) = run_passes([WriteInPlace()], gm, check=True)
    assert not again.modified
    if not islands:
        given = [one.clone() for one in inputs]
        torch.testing.assert_close(gm(*given), function(*inputs), rtol=0, atol=0)
        torch.testing.assert_close(given, list(inputs), rtol=0, atol=0)
    return gm


def square(*_: Any) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


X, Y = square(), square() + 1


def test_a_product_is_overwritten() -> None:
    assert targets(rewritten(lambda x: torch.relu(x @ x), X)) == ["aten.mm.default", "aten.relu_.default"]


def test_a_chain_is_one_tensor() -> None:
    gm = rewritten(lambda x: torch.tanh(torch.relu(x @ x) * 2), X)
    assert targets(gm) == ["aten.mm.default", "aten.relu_.default", "aten.mul_.Tensor", "aten.tanh_.default"]


def test_the_second_input_of_a_sum_is_overwritten_if_the_first_is_not_the_graphs() -> None:
    gm = rewritten(lambda x, y: x + y @ y, X, Y)
    assert targets(gm) == ["aten.mm.default", "aten.add_.Tensor"]


def test_a_difference_is_not_turned_round() -> None:
    assert targets(rewritten(lambda x, y: x - y @ y, X, Y)) == ["aten.mm.default", "aten.sub.Tensor"]


def test_a_factor_of_the_second_input_stays_with_it() -> None:
    gm = rewritten(lambda x, y: torch.add(x, y @ y, alpha=3), X, Y)
    assert targets(gm) == ["aten.mm.default", "aten.add.Tensor"]


def test_a_gradient_is_written_over_the_gradient_that_it_is_made_of() -> None:
    gm = rewritten(lambda x, y: aten.threshold_backward.default(x @ x, y, 0), X, Y)
    assert targets(gm) == ["aten.mm.default", "aten.threshold_backward.grad_input"]


@pytest.mark.parametrize(
    "gradient",
    [
        lambda g, y: aten.elu_backward.default(g, 1.0, 1.0, 1.0, False, y),
        lambda g, y: aten.gelu_backward.default(g, y),
        lambda g, y: aten.gelu_backward.default(g, y, approximate="tanh"),
        lambda g, y: aten.hardsigmoid_backward.default(g, y),
        lambda g, y: aten.hardtanh_backward.default(g, y, -1, 1),
        lambda g, y: aten.leaky_relu_backward.default(g, y, 0.1, False),
        lambda g, y: aten.sigmoid_backward.default(g, y),
        lambda g, y: aten.silu_backward.default(g, y),
        lambda g, y: aten.tanh_backward.default(g, y),
    ],
)
def test_the_other_gradients_likewise(gradient: Callable[[Tensor, Tensor], Tensor]) -> None:
    gm = rewritten(lambda x, y: gradient(x @ x, y), X, Y)
    assert targets(gm)[-1].endswith("_backward.grad_input")


def test_part_of_a_tuple_is_overwritten() -> None:
    def normed(x: Tensor) -> Tensor:
        return torch.relu(aten.native_layer_norm.default(x, [4], None, None, 1e-5)[0])

    assert targets(rewritten(normed, X))[-1] == "aten.relu_.default"


def test_a_view_of_a_product_is_overwritten() -> None:
    gm = rewritten(lambda x: torch.tanh(torch.relu((x @ x).view(2, 8)).view(4, 4)), X)
    assert targets(gm) == [
        "aten.mm.default",
        "aten.view.default",
        "aten.relu_.default",
        "aten.view.default",
        "aten.tanh_.default",
    ]
    assert targets(rewritten(lambda x: torch.relu((x @ x).t()), X))[-1] == "aten.relu_.default"


# -- what must not be overwritten ------------------------------------------------------------------------------------


def test_an_input_is_not_overwritten() -> None:
    assert targets(rewritten(torch.relu, X)) == ["aten.relu.default"]


def test_a_view_of_an_input_is_not_overwritten() -> None:
    assert targets(rewritten(lambda x: torch.relu(x.t()), X))[-1] == "aten.relu.default"


def test_what_leaves_the_graph_is_not_overwritten() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ x
        return product, torch.relu(product)

    assert targets(rewritten(both, X)) == ["aten.mm.default", "aten.relu.default"]


def test_what_is_read_later_is_not_overwritten() -> None:
    def late(x: Tensor) -> Tensor:
        product = x @ x
        return torch.relu(product) @ product

    assert targets(rewritten(late, X)) == ["aten.mm.default", "aten.relu.default", "aten.mm.default"]


def test_what_was_read_before_is_overwritten() -> None:
    def early(x: Tensor) -> Tensor:
        product = x @ x
        return (product @ x) @ torch.relu(product)

    gm = rewritten(early, X)
    assert targets(gm) == ["aten.mm.default", "aten.mm.default", "aten.relu_.default", "aten.mm.default"]


def test_what_has_a_view_that_is_read_later_is_not_overwritten() -> None:
    def viewed(x: Tensor) -> Tensor:
        product = x @ x
        turned = product.t()
        return torch.relu(product) @ turned

    assert "aten.relu.default" in targets(rewritten(viewed, X))


def test_a_view_of_what_is_read_later_is_not_overwritten() -> None:
    def viewed(x: Tensor) -> Tensor:
        product = x @ x
        return torch.relu(product.view(2, 8)).view(4, 4) @ product

    assert "aten.relu.default" in targets(rewritten(viewed, X))


def test_what_is_read_in_another_order_while_it_is_written_is_not_overwritten() -> None:
    def turned(x: Tensor) -> Tensor:
        product = x @ x
        return product.view(4, 4).add(product.t())

    assert targets(rewritten(turned, X))[-1] == "aten.add.Tensor"


def test_a_part_is_not_overwritten() -> None:
    assert targets(rewritten(lambda x: torch.relu((x @ x)[:2]), X))[-1] == "aten.relu.default"


def test_another_shape_is_not_overwritten() -> None:
    gm = rewritten(lambda x, row: (x[:1] @ x) + row, X, Y)
    assert targets(gm)[-1] == "aten.add.Tensor"


def test_another_layout_is_not_overwritten() -> None:
    gm = rewritten(lambda x, y: aten.threshold_backward.default(x @ x, y.t() @ y, 0), X, Y)
    assert targets(gm)[-1] == "aten.threshold_backward.grad_input"
    assert targets(rewritten(lambda x, y: x + (y @ y).t(), X, Y))[-1] == "aten.add.Tensor"


def test_another_dtype_is_not_overwritten() -> None:
    assert targets(rewritten(lambda x: (x @ x) > 0, X))[-1] == "aten.gt.Scalar"


def test_what_a_session_gives_is_not_overwritten() -> None:
    gm = rewritten(lambda x: torch.relu(x @ x), X, islands=(aten.mm.default,))
    assert targets(gm)[-1] == "aten.relu.default"


def test_what_a_session_reads_is_not_overwritten() -> None:
    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ x
        return torch.exp(product), torch.relu(product)

    assert "aten.relu.default" in targets(rewritten(read, X, islands=(aten.exp.default,)))
