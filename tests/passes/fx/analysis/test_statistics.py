"""Tests of the statistics that normalizations and attention hand to their gradients."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, Node

from ort_dynamo.passes.fx.analysis.statistics import STATISTICS, gradients_reading, normalizes
from ort_dynamo.torch_internals.kernels.operators import aten


@pytest.mark.parametrize("target", STATISTICS)
def test_batch_layer_and_group_norms_take_wider_parameters(target: torch._ops.OpOverload) -> None:
    node = Graph().call_function(target)
    others = (aten._fused_rms_norm.default, aten._scaled_dot_product_flash_attention_for_cpu.default)
    assert normalizes(node) == (target not in others)


def test_other_operators_do_not_normalize() -> None:
    assert not normalizes(Graph().call_function(aten.add.Tensor))
    assert not normalizes(Graph().call_function(aten.native_layer_norm_backward.default))


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("alias", [aten.detach.default, aten.alias.default])
def test_gradients_read_a_statistic_and_its_aliases(alias: torch._ops.OpOverload, is_alone: bool) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    norm = graph.call_function(aten.native_layer_norm.default, (x, [4], None, None, 1e-5))
    mean = graph.call_function(operator.getitem, (norm, 1))
    other = graph.call_function(operator.getitem, (norm, 2))
    first = graph.call_function(alias, (mean,))
    second = graph.call_function(alias, (first,))

    def gradient(statistic: Node) -> Node:
        args = (x, x, [4], statistic, other, None, None, [True, False, False])
        return graph.call_function(aten.native_layer_norm_backward.default, args)

    readers = [(gradient(mean), mean), (gradient(second), second)]
    if not is_alone:
        graph.call_function(aten.mul.Tensor, (second, 2))
    aliases, gradients, alone = gradients_reading(mean)
    assert aliases == [mean, first, second]
    assert sorted(gradients, key=str) == sorted(readers, key=str)
    assert alone == is_alone
