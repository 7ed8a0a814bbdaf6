"""Tests of running torch's nodes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.torch_graph.reinplace import Reinplace
from ort_dynamo.segment.segment import segment
from ort_dynamo.torch_internals.kernels.operators import aten


def traced(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def outer(function: Callable[..., Any], *inputs: Tensor, islands: tuple[Any, ...] = ()) -> GraphModule:
    def refuse(node: Node) -> str | None:
        return None if node.target in islands else "torch's"

    return segment(traced(function, *inputs), refuse, torch.device("cpu")).gm


def square(*_: Any) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


X, Y = square(), square() + 1


def test_a_product_is_overwritten() -> None:
    assert_fx_rewrites(
        Reinplace(),
        """
        x: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        relu = aten.relu.default(mm)  # f32[4, 4]
        return relu
        """,
        """
        x: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        relu_ = aten.relu_.default(mm)  # f32[4, 4]
        return relu_
        """,
    )


def test_a_chain_is_one_tensor() -> None:
    assert_fx_rewrites(
        Reinplace(),
        """
        x: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        relu = aten.relu.default(mm)  # f32[4, 4]
        mul = aten.mul.Tensor(relu, 2)  # f32[4, 4]
        tanh = aten.tanh.default(mul)  # f32[4, 4]
        return tanh
        """,
        """
        x: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        relu_ = aten.relu_.default(mm)  # f32[4, 4]
        mul_ = aten.mul_.Tensor(relu_, 2)  # f32[4, 4]
        tanh_ = aten.tanh_.default(mul_)  # f32[4, 4]
        return tanh_
        """,
    )


def test_the_second_input_of_a_sum_is_overwritten_if_the_first_is_not_the_graphs() -> None:
    assert_fx_rewrites(
        Reinplace(),
        """
        x: f32[4, 4]
        y: f32[4, 4]
        mm = aten.mm.default(y, y)  # f32[4, 4]
        add = aten.add.Tensor(x, mm)  # f32[4, 4]
        return add
        """,
        """
        x: f32[4, 4]
        y: f32[4, 4]
        mm = aten.mm.default(y, y)  # f32[4, 4]
        add_ = aten.add_.Tensor(mm, x)  # f32[4, 4]
        return add_
        """,
    )


def test_a_difference_is_not_turned_round() -> None:
    assert_fx_untouched(Reinplace(), traced(lambda x, y: x - y @ y, X, Y))


def test_a_factor_of_the_second_input_stays_with_it() -> None:
    assert_fx_untouched(Reinplace(), traced(lambda x, y: torch.add(x, y @ y, alpha=3), X, Y))


def test_a_gradient_is_written_over_the_gradient_that_it_is_made_of() -> None:
    assert_fx_rewrites(
        Reinplace(),
        """
        x: f32[4, 4]
        y: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        threshold_backward = aten.threshold_backward.default(mm, y, 0)  # f32[4, 4]
        return threshold_backward
        """,
        """
        x: f32[4, 4]
        y: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        threshold_backward = aten.threshold_backward.grad_input(mm, y, 0, grad_input=mm)  # f32[4, 4]
        return threshold_backward
        """,
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("elu", "1.0, 1.0, 1.0, False, y"),
        ("gelu", "y"),
        ("gelu", "y, approximate='tanh'"),
        ("hardsigmoid", "y"),
        ("hardtanh", "y, -1, 1"),
        ("leaky_relu", "y, 0.1, False"),
        ("sigmoid", "y"),
        ("silu", "y"),
        ("tanh", "y"),
    ],
)
def test_the_other_gradients_likewise(name: str, arguments: str) -> None:
    assert_fx_rewrites(
        Reinplace(),
        f"""
        x: f32[4, 4]
        y: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        {name}_backward = aten.{name}_backward.default(mm, {arguments})  # f32[4, 4]
        return {name}_backward
        """,
        f"""
        x: f32[4, 4]
        y: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        {name}_backward = aten.{name}_backward.grad_input(mm, {arguments}, grad_input=mm)  # f32[4, 4]
        return {name}_backward
        """,
    )


def test_part_of_a_tuple_is_overwritten() -> None:
    def normed(x: Tensor) -> Tensor:
        return torch.relu(aten.native_layer_norm.default(x, [4], None, None, 1e-5)[0])

    assert_fx_rewrites(
        Reinplace(),
        """
        x: f32[4, 4]
        native_layer_norm = aten.native_layer_norm.default(x, [4], None, None, 1e-05)
        getitem = native_layer_norm[0]  # f32[4, 4]
        getitem_1 = native_layer_norm[1]  # f32[4, 1]
        getitem_2 = native_layer_norm[2]  # f32[4, 1]
        relu = aten.relu.default(getitem)  # f32[4, 4]
        return relu
        """,
        """
        x: f32[4, 4]
        native_layer_norm = aten.native_layer_norm.default(x, [4], None, None, 1e-05)
        getitem = native_layer_norm[0]  # f32[4, 4]
        getitem_1 = native_layer_norm[1]  # f32[4, 1]
        getitem_2 = native_layer_norm[2]  # f32[4, 1]
        relu_ = aten.relu_.default(getitem)  # f32[4, 4]
        return relu_
        """,
    )


def test_a_view_of_a_product_is_overwritten() -> None:
    assert_fx_rewrites(
        Reinplace(),
        """
        x: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        view = aten.view.default(mm, [2, 8])  # f32[2, 8]
        relu = aten.relu.default(view)  # f32[2, 8]
        view_1 = aten.view.default(relu, [4, 4])  # f32[4, 4]
        tanh = aten.tanh.default(view_1)  # f32[4, 4]
        return tanh
        """,
        """
        x: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        view = aten.view.default(mm, [2, 8])  # f32[2, 8]
        relu_ = aten.relu_.default(view)  # f32[2, 8]
        view_1 = aten.view.default(relu_, [4, 4])  # f32[4, 4]
        tanh_ = aten.tanh_.default(view_1)  # f32[4, 4]
        return tanh_
        """,
    )
    assert_fx_rewrites(
        Reinplace(),
        """
        x: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        t = aten.t.default(mm)  # f32[4, 4] strides (1, 4)
        relu = aten.relu.default(t)  # f32[4, 4] strides (1, 4)
        return relu
        """,
        """
        x: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        t = aten.t.default(mm)  # f32[4, 4] strides (1, 4)
        relu_ = aten.relu_.default(t)  # f32[4, 4] strides (1, 4)
        return relu_
        """,
    )


# -- tensors that must not be overwritten ----------------------------------------------------------------------------


def test_an_input_is_not_overwritten() -> None:
    assert_fx_untouched(Reinplace(), traced(torch.relu, X))


def test_a_view_of_an_input_is_not_overwritten() -> None:
    assert_fx_untouched(Reinplace(), traced(lambda x: torch.relu(x.t()), X))


def test_an_output_is_not_overwritten() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ x
        return product, torch.relu(product)

    assert_fx_untouched(Reinplace(), traced(both, X))


def test_a_tensor_read_later_is_not_overwritten() -> None:
    def late(x: Tensor) -> Tensor:
        product = x @ x
        return torch.relu(product) @ product

    assert_fx_untouched(Reinplace(), traced(late, X))


def test_a_tensor_read_before_is_overwritten() -> None:
    def early(x: Tensor) -> Tensor:
        product = x @ x
        return (product @ x) @ torch.relu(product)

    assert_fx_rewrites(
        Reinplace(),
        """
        x: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        mm_1 = aten.mm.default(mm, x)  # f32[4, 4]
        relu = aten.relu.default(mm)  # f32[4, 4]
        mm_2 = aten.mm.default(mm_1, relu)  # f32[4, 4]
        return mm_2
        """,
        """
        x: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        mm_1 = aten.mm.default(mm, x)  # f32[4, 4]
        relu_ = aten.relu_.default(mm)  # f32[4, 4]
        mm_2 = aten.mm.default(mm_1, relu_)  # f32[4, 4]
        return mm_2
        """,
    )


def test_the_base_of_a_view_read_later_is_not_overwritten() -> None:
    def viewed(x: Tensor) -> Tensor:
        product = x @ x
        turned = product.t()
        return torch.relu(product) @ turned

    assert_fx_untouched(Reinplace(), traced(viewed, X))


def test_a_view_of_a_tensor_read_later_is_not_overwritten() -> None:
    def viewed(x: Tensor) -> Tensor:
        product = x @ x
        return torch.relu(product.view(2, 8)).view(4, 4) @ product

    assert_fx_untouched(Reinplace(), traced(viewed, X))


def test_a_tensor_read_transposed_by_the_same_operator_is_not_overwritten() -> None:
    def turned(x: Tensor) -> Tensor:
        product = x @ x
        return product.view(4, 4).add(product.t())

    assert_fx_untouched(Reinplace(), traced(turned, X))


def test_a_part_is_not_overwritten() -> None:
    assert_fx_untouched(Reinplace(), traced(lambda x: torch.relu((x @ x)[:2]), X))


def test_another_shape_is_not_overwritten() -> None:
    assert_fx_untouched(Reinplace(), traced(lambda x, row: (x[:1] @ x) + row, X, Y))


def test_another_layout_is_not_overwritten() -> None:
    assert_fx_rewrites(
        Reinplace(),
        """
        x: f32[4, 4]
        y: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        t = aten.t.default(y)  # f32[4, 4] strides (1, 4)
        mm_1 = aten.mm.default(t, y)  # f32[4, 4]
        threshold_backward = aten.threshold_backward.default(mm, mm_1, 0)  # f32[4, 4]
        return threshold_backward
        """,
        """
        x: f32[4, 4]
        y: f32[4, 4]
        mm = aten.mm.default(x, x)  # f32[4, 4]
        t = aten.t.default(y)  # f32[4, 4] strides (1, 4)
        mm_1 = aten.mm.default(t, y)  # f32[4, 4]
        threshold_backward = aten.threshold_backward.grad_input(mm, mm_1, 0, grad_input=mm)  # f32[4, 4]
        return threshold_backward
        """,
    )
    assert_fx_untouched(Reinplace(), traced(lambda x, y: x + (y @ y).t(), X, Y))


def test_another_dtype_is_not_overwritten() -> None:
    assert_fx_untouched(Reinplace(), traced(lambda x: (x @ x) > 0, X))


@pytest.mark.parametrize("view", [aten._conj.default, aten._neg_view.default], ids=str)
def test_a_view_of_other_values_is_not_overwritten(view: Callable[[Tensor], Tensor]) -> None:
    gm = traced(lambda x: view(x.sgn()).sin(), torch.complex(X, Y))
    (copy,) = gm.graph.find_nodes(op="call_function", target=aten.clone.default)  # AOTAutograd traces none
    copy.replace_all_uses_with(copy.all_input_nodes[0])
    gm.graph.erase_node(copy)
    assert_fx_untouched(Reinplace(), gm)


def test_a_sessions_output_is_not_overwritten() -> None:
    gm = outer(lambda x: torch.relu(x @ x), X, islands=(aten.mm.default,))
    assert_fx_untouched(Reinplace(), gm)


def test_a_sessions_input_is_not_overwritten() -> None:
    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ x
        return torch.exp(product), torch.relu(product)

    gm = outer(read, X, islands=(aten.exp.default,))
    assert_fx_untouched(Reinplace(), gm)
