"""Statistics between a normalization and its gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from ort_dynamo.passes.fx.keep_statistics_wide import KeepStatisticsWide

Capture = Callable[..., GraphModule]

aten = torch.ops.aten

NORMALIZATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "layer": lambda x: F.layer_norm(x, (4,)),
    "group": lambda x: F.group_norm(x, 2),
}


def dtypes(gm: GraphModule) -> dict[str, list[torch.dtype]]:
    """The dtypes of a normalization's results, and of its gradient's arguments."""
    (forward,) = (n for n in gm.graph.nodes if "_norm" in str(n.target) and "backward" not in str(n.target))
    (backward,) = (n for n in gm.graph.nodes if "_norm_backward" in str(n.target))
    read = [n.meta["val"] for n in backward.args if isinstance(n, Node)]
    return {"made": [fake.dtype for fake in forward.meta["val"][:3]], "read": [fake.dtype for fake in read]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_those_of_a_narrow_tensor_are_float32(name: str, dtype: torch.dtype, joint_graph: Capture) -> None:
    x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
    gm = joint_graph(lambda x: NORMALIZATIONS[name](x).sum(), x)  # the fixture has run the pass
    assert dtypes(gm) == {"made": [dtype, torch.float32, torch.float32], "read": [dtype, dtype, *[torch.float32] * 2]}
    result = KeepStatisticsWide()(gm)
    assert result is not None
    assert not result.modified


def test_those_of_a_float64_tensor_stay(joint_graph: Capture) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gm = joint_graph(lambda x: NORMALIZATIONS["layer"](x).sum(), x)
    assert dtypes(gm) == {"made": [torch.float64] * 3, "read": [torch.float64] * 4}


def test_those_that_the_program_reads_stay(joint_graph: Capture) -> None:
    def function(x: Tensor) -> Tensor:
        y, mean, _ = aten.native_layer_norm(x, [4], None, None, 1e-5)
        return y.sum() + mean.sum()

    gm = joint_graph(function, torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True))
    assert dtypes(gm)["made"] == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_those_of_attention_are_as_wide_as_its_input(dtype: torch.dtype, joint_graph: Capture) -> None:
    rows = [torch.randn(1, 2, 3, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
    gm = joint_graph(lambda q, k, v: F.scaled_dot_product_attention(q, k, v).sum(), *rows)
    (forward,) = gm.graph.find_nodes(
        op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default
    )
    (logarithms,) = (result for result in forward.users if result.args[1] == 1)
    for fake in (logarithms.meta["val"], forward.meta["val"][1]):
        assert fake.dtype == dtype  # up to torch 2.12, traced graphs say float32
