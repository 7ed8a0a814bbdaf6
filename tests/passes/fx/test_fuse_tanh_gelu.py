"""A GELU by tanh that is written out becomes torch's operator, with its gradient; its likes stay."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from joint_graphs import saved_bytes, weight
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched, graph_text
from ort_dynamo.passes.fx.fuse_tanh_gelu import FuseTanhGelu
from ort_dynamo.testing import TOLERANCES

Capture = Callable[..., GraphModule]

SCALE = math.sqrt(2 / math.pi)


def written(x: Tensor, scale: float = SCALE, power: float = 3.0) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(scale * (x + 0.044715 * torch.pow(x, power))))


def test_a_formula_and_its_gradient_become_operators(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: written(x) @ w, weight(2, 3), weight(3, 4))
    assert_fx_rewrites(
        FuseTanhGelu(),
        """
        primals_1: f32[2, 3]
        primals_2: f32[3, 4]
        tangents_1: f32[2, 4] | backward
        mul = aten.mul.Tensor(primals_1, 0.5)  # f32[2, 3]
        pow = aten.pow.Tensor_Scalar(primals_1, 3.0)  # f32[2, 3]
        mul_1 = aten.mul.Tensor(pow, 0.044715)  # f32[2, 3]
        add = aten.add.Tensor(primals_1, mul_1)  # f32[2, 3]
        mul_2 = aten.mul.Tensor(add, 0.7978845608028654)  # f32[2, 3]
        tanh = aten.tanh.default(mul_2)  # f32[2, 3]
        add_1 = aten.add.Tensor(tanh, 1.0)  # f32[2, 3]
        mul_3 = aten.mul.Tensor(mul, add_1)  # f32[2, 3]
        mm = aten.mm.default(mul_3, primals_2)  # f32[2, 4]
        t = aten.t.default(mul_3)  # f32[3, 2] strides (1, 3) | backward
        mm_1 = aten.mm.default(t, tangents_1)  # f32[3, 4] | backward
        t_1 = aten.t.default(primals_2)  # f32[4, 3] strides (1, 4) | backward
        mm_2 = aten.mm.default(tangents_1, t_1)  # f32[2, 3] | backward
        mul_4 = aten.mul.Tensor(mm_2, mul)  # f32[2, 3] | backward
        mul_5 = aten.mul.Tensor(mm_2, add_1)  # f32[2, 3] | backward
        tanh_backward = aten.tanh_backward.default(mul_4, tanh)  # f32[2, 3] | backward
        mul_6 = aten.mul.Tensor(tanh_backward, 0.7978845608028654)  # f32[2, 3] | backward
        mul_7 = aten.mul.Tensor(mul_6, 0.044715)  # f32[2, 3] | backward
        pow_1 = aten.pow.Tensor_Scalar(primals_1, 2.0)  # f32[2, 3] | backward
        mul_8 = aten.mul.Scalar(pow_1, 3.0)  # f32[2, 3] | backward
        mul_9 = aten.mul.Tensor(mul_7, mul_8)  # f32[2, 3] | backward
        add_2 = aten.add.Tensor(mul_6, mul_9)  # f32[2, 3] | backward
        mul_10 = aten.mul.Tensor(mul_5, 0.5)  # f32[2, 3] | backward
        add_3 = aten.add.Tensor(add_2, mul_10)  # f32[2, 3] | backward
        return [mm, add_3, mm_1]
        """,
        """
        primals_1: f32[2, 3]
        primals_2: f32[3, 4]
        tangents_1: f32[2, 4] | backward
        gelu = aten.gelu.default(primals_1, approximate='tanh')  # f32[2, 3]
        mm = aten.mm.default(gelu, primals_2)  # f32[2, 4]
        t = aten.t.default(gelu)  # f32[3, 2] strides (1, 3) | backward
        mm_1 = aten.mm.default(t, tangents_1)  # f32[3, 4] | backward
        t_1 = aten.t.default(primals_2)  # f32[4, 3] strides (1, 4) | backward
        mm_2 = aten.mm.default(tangents_1, t_1)  # f32[2, 3] | backward
        gelu_backward = aten.gelu_backward.default(mm_2, primals_1, approximate='tanh')  # f32[2, 3] | backward
        return [mm, gelu_backward, mm_1]
        """,
        gm,
        tolerance=TOLERANCES[torch.float32],
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.tanh(0.7978845608 * (0.044715 * x**3 + x)) + 1) * (x * 0.5),  # fewer digits, other orders
        lambda x: written(x * 2) + 1,
    ],
    ids=["other orders", "in a graph"],
)
def test_a_formula_without_gradient_becomes_an_operator(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 5)
    gm = make_fx(function, tracing_mode="fake")(x)
    assert run_twice(FuseTanhGelu(), gm)
    assert "gelu" in graph_text(gm)
    assert "tanh." not in graph_text(gm)
    torch.testing.assert_close(gm(x), function(x))


def test_two_formulas_of_symbolic_sizes_become_operators(joint_graph: Capture) -> None:
    def literal(x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))

    gm = joint_graph(lambda x, w: literal(literal(x) @ w).sum(), weight(5, 3), weight(3, 3), dynamic=True)
    assert run_twice(FuseTanhGelu(), gm)
    assert graph_text(gm).count("aten.gelu.default") == 2
    assert graph_text(gm).count("aten.gelu_backward.default") == 2
    assert "tanh_backward" not in graph_text(gm)


def test_the_backward_reads_the_input_alone(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w, v: written(x @ w) @ v, weight(2, 3), weight(3, 4), weight(4, 2))
    before = saved_bytes(gm)
    assert run_twice(FuseTanhGelu(), gm)
    assert saved_bytes(gm) < before


def with_tanh(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    tanh = torch.tanh(SCALE * (x + 0.044715 * torch.pow(x, 3.0)))
    return 0.5 * x * (1.0 + tanh) @ w, tanh.detach()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: written(x.bfloat16()).float() @ w,
        lambda x, w: written(x.double()).float() @ w,
        lambda x, w: written(x, scale=0.8) @ w,
        lambda x, w: written(x, power=2.0) @ w,
        lambda x, w: 0.5 * x * (1.0 + torch.tanh(SCALE * (x + 0.044715 * x * x * x))) @ w,
        lambda x, w: 0.5 * x * (1.0 + torch.tanh(SCALE * torch.add(x, torch.pow(x, 3.0), alpha=0.044715))) @ w,
        with_tanh,
        lambda x, w: torch.nn.functional.gelu(x) @ w,
    ],
    ids=["half", "double", "another scale", "another power", "products", "an alpha", "tanh is read", "another gelu"],
)
def test_others_stay(function: Callable[[Tensor, Tensor], Tensor], joint_graph: Capture) -> None:
    assert_fx_untouched(FuseTanhGelu(), joint_graph(function, weight(2, 3), weight(3, 4)))


def test_a_formula_that_is_recomputed_in_part_stays(joint_graph: Capture) -> None:
    gm = joint_graph(lambda x, w: written(x) @ w, weight(2, 3), weight(3, 4))
    (tanh,) = (node for node in gm.graph.nodes if node.name == "tanh")
    tanh.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    assert_fx_untouched(FuseTanhGelu(), gm)
