"""Estimated times of attention: counted here, where torch's own count refuses operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.passes.fx.analysis.saved_tensors import time_of

aten = torch.ops.aten


def attention(gm: GraphModule) -> Node:
    (node,) = (n for n in gm.graph.nodes if "attention" in str(n.target))
    found: Node = node
    return found


def traced(function: Any, *tensors: Tensor) -> GraphModule:
    gm: GraphModule = make_fx(function, tracing_mode="fake")(*tensors)
    return gm


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return aten._flash_attention_forward(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False)[0]


def efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return aten._efficient_attention_forward(q, k, v, None, None, None, None, None, 0.0, 0, True)[0]


def operands(rows: int, columns: int, heads: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(2, count, heads, 16, dtype=torch.float16) for count in (rows, columns, columns))


@pytest.mark.parametrize("function", [flash, efficient])
def test_an_operator_that_is_called_directly_has_rows_before_heads(function: Any) -> None:
    given = operands(1100, 3200, 4)  # whose rows, taken for heads, are no multiple of one another
    expected = time_of(attention(traced(heads_first, *(one.transpose(1, 2) for one in given))))
    assert expected > 2 * 2 * 4 * 1100 * 3200 * 32 / 10 - 1
    assert time_of(attention(traced(function, *given))) == expected


def test_several_heads_of_a_query_share_one_of_the_keys() -> None:
    q, k = torch.zeros(1, 8, 512, 16), torch.zeros(1, 2, 512, 16)
    assert time_of(attention(traced(heads_first, q, k, k))) == pytest.approx(2 * 8 * 512 * 512 * 32 / 10)
