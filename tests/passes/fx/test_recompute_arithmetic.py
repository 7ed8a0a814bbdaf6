"""Results of arithmetic whose arguments are kept anyway: a joint graph in, tags out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from joint_graphs import kept_bytes, tagged_by, weight
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional as F

from ort_dynamo.passes.fx.recompute_arithmetic import RecomputeArithmetic

Capture = Callable[..., GraphModule]


def repeated(gm: GraphModule, least: int | None = None) -> list[str]:
    return tagged_by(RecomputeArithmetic(least), gm)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


# -- one number ----------------------------------------------------------------------------------------------------


def test_half_of_what_is_kept_is_made_again(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w, v: (gelu(x @ w) @ v).sum(), weight(2, 3), weight(3, 4), weight(4, 2))
    assert kept_bytes(gm) == 5 * 4 * 8  # the product, its half, tanh, one more than that, and the whole
    assert repeated(gm) == ["mul", "add_1"]
    assert kept_bytes(gm) == 3 * 4 * 8


def test_a_chain_is_made_again_from_its_begin(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        half = product / 2
        return (product.sin() + half.sin() + (half + 1).sin()).sum()

    gm = joint_graph(function, weight(2, 3), weight(3, 4))
    assert kept_bytes(gm) == 3 * 4 * 8
    assert repeated(gm) == ["div", "add_1"]
    assert kept_bytes(gm) == 4 * 8


def test_what_only_leads_to_a_kept_tensor_is_not_made_again(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        return (product.sin() + (product / 2 + 1).sin()).sum()  # of a sum no gradient reads its arguments

    gm = joint_graph(function, weight(2, 3), weight(3, 4))
    assert repeated(gm) == []
    assert kept_bytes(gm) == 2 * 4 * 8


def test_a_scaled_tensor_whose_source_is_not_kept_stays(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: (x @ w / 2).sin().sum(), weight(2, 3), weight(3, 4))
    assert repeated(gm) == []


def test_an_input_that_the_backward_does_not_read_may_be_freed(joint_graph: Capture) -> None:
    assert repeated(joint_graph(lambda x: (x / 2).sin().sum(), weight(4))) == []
    assert repeated(joint_graph(lambda x: ((x / 2).sin() * x.cos()).sum(), weight(4))) == ["div"]


def test_two_tensors_are_no_number(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        product = x @ w
        return ((product + product.sin()).sin() + product.cos()).sum()

    assert repeated(joint_graph(function, weight(2, 3), weight(3, 4))) == []


# -- several tensors -----------------------------------------------------------------------------------------------


def gated(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
    return (((x @ w).sigmoid() * (x @ v)) @ u).sum()


GATED = (weight(2, 3), weight(3, 4), weight(3, 4), weight(4, 2))
"""Of `gated` sigmoid, the second product and what the two give are kept, 32 bytes each."""


def test_a_product_of_two_kept_tensors_is_made_again_from_so_many_bytes(joint_graph: Capture) -> None:
    gm = joint_graph(gated, *GATED)
    assert kept_bytes(gm) == 3 * 32
    assert repeated(gm, least=32) == ["mul"]
    assert kept_bytes(gm) == 2 * 32


def test_a_smaller_product_stays(joint_graph: Capture) -> None:
    assert repeated(joint_graph(gated, *GATED), least=33) == []
    assert repeated(joint_graph(gated, *GATED)) == []


def test_a_product_that_the_program_gets_lives_anyway(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        product = (x @ w).sigmoid() * (x @ v)
        return product, product @ u

    assert repeated(joint_graph(function, *GATED), least=0) == []


def test_what_is_no_arithmetic_stays(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w, v: (F.gelu(x @ w) @ v).sum(), weight(2, 3), weight(3, 4), weight(4, 2))
    assert repeated(gm, least=0) == []


def test_of_a_normalization_only_its_statistics_are_kept(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor, v: Tensor) -> Tensor:
        return (F.layer_norm(x @ w, (4,), scale, bias) @ v).sum()

    inputs = (weight(2, 3), weight(3, 4), weight(4), weight(4), weight(4, 2))
    gm = joint_graph(function, *inputs)
    assert kept_bytes(gm) == 32 + 32 + 2 * 8  # what is normalized, the result, and mean and deviation of two rows
    assert repeated(gm, least=33) == []
    assert repeated(gm, least=32) == ["native_layer_norm", "getitem"]
    assert kept_bytes(gm) == 32 + 2 * 8


def test_of_an_rms_normalization_that_is_spelled_out_too(joint_graph: Capture) -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, v: Tensor) -> Tensor:
        return (F.rms_norm(x @ w, (4,), scale) @ v).sum()

    gm = joint_graph(function, weight(2, 3), weight(3, 4), weight(4), weight(4, 2))
    # What is normalized, that by its root mean square, that by the scale, and the roots.
    assert kept_bytes(gm) == 3 * 32 + 8
    assert repeated(gm, least=32) == ["mul", "mul_1"]
    assert kept_bytes(gm) == 32 + 8


def test_a_normalization_whose_result_nothing_keeps_is_made_once(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: F.layer_norm(x @ w, (4,)).sum(), weight(2, 3), weight(3, 4))
    assert repeated(gm, least=0) == []
