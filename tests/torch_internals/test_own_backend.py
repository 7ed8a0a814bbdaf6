"""A backend of a region of its own, which Dynamo treats as the registered one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from ort_dynamo.torch_internals.tracing.dynamo import OwnBackend


@pytest.mark.parametrize("name", ["ort_train", "a name of no backend"])
def test_equal_backends_share_the_graphs_of_a_function(name: str) -> None:
    compiled: list[GraphModule] = []

    def function(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled.append(gm)
        return gm.forward

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(3)
    for _ in range(2):
        assert torch.equal(torch._dynamo.optimize(OwnBackend(function, name))(double)(x), x * 2)
    assert len(compiled) == 1
    other = OwnBackend(lambda gm, inputs: function(gm, inputs), name)
    assert torch.equal(torch._dynamo.optimize(other)(double)(x), x * 2)
    assert len(compiled) == 2


def test_parameters_can_be_swapped_after_a_compile() -> None:
    module = nn.Linear(3, 2)
    compiled = torch._dynamo.optimize(OwnBackend(lambda gm, inputs: gm.forward, "ort_train"))(module)
    compiled(torch.ones(1, 3))
    torch.utils.swap_tensors(module.weight, nn.Parameter(torch.zeros(2, 3)))
    assert torch.equal(compiled(torch.ones(1, 3)), module.bias.expand(1, 2))
