"""Graph before, marks after: where a backward is cut into sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.graph.marks import CHOSEN, SECTION
from ort_dynamo.passes.fx.analysis.memory import peaks
from ort_dynamo.passes.fx.recompute.cut_into_sections import CutIntoSections
from ort_dynamo.segment.segment import Segmented, segment

ROWS, WIDTH = 32, 8
SAVED = ROWS * WIDTH * 4
"""Bytes of one saved tensor."""


def layers(tangents: Tensor, weight: Tensor, *saved: Tensor) -> list[Tensor]:
    """The backward of layers tanh(x @ weight), each of which has saved two tensors: the last first."""
    gradients = []
    for x, y in zip(saved[::2], saved[1::2], strict=True):
        product = tangents * (1 - y * y)
        gradients.append(x.t() @ product)
        tangents = product @ weight.t()
    return [*gradients, tangents]


def given(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


def backward(function: Callable[..., Any], *inputs: Tensor, freed: int) -> tuple[GraphModule, tuple[str, ...]]:
    """The graph of `function`, and the names of the last `freed` of its inputs."""
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    return gm, tuple(names[len(names) - freed :])


def of_layers(count: int) -> tuple[GraphModule, tuple[str, ...], list[Tensor]]:
    tangents, *saved = given(1 + 2 * count)
    inputs = [tangents, torch.eye(WIDTH), *saved]
    gm, freed = backward(layers, *inputs, freed=2 * count)
    return gm, freed, inputs


def sections(gm: GraphModule) -> list[str]:
    """The names of each section's nodes that compute."""
    found: dict[int, list[str]] = {}
    for node in gm.graph.nodes:
        if SECTION in node.meta and not node.name.startswith("t"):
            found.setdefault(node.meta[SECTION], []).append(node.target.__name__.split(".")[0])
    return [" ".join(found[index]) for index in range(len(found))]


def islands(gm: GraphModule) -> Segmented:
    return segment(gm, lambda node: None, torch.device("cpu"))


LAYER = "mul rsub mul mm mm"


def test_sections_end_between_layers() -> None:
    gm, freed, inputs = of_layers(4)
    pass_ = CutIntoSections(freed, least=1, most=4)
    assert_fx_rewrites(
        pass_,
        """
        arg0_1: f32[32, 8]
        arg1_1: f32[8, 8]
        arg2_1: f32[32, 8]
        arg3_1: f32[32, 8]
        arg4_1: f32[32, 8]
        arg5_1: f32[32, 8]
        arg6_1: f32[32, 8]
        arg7_1: f32[32, 8]
        arg8_1: f32[32, 8]
        arg9_1: f32[32, 8]
        mul = aten.mul.Tensor(arg3_1, arg3_1)  # f32[32, 8]
        rsub = aten.rsub.Scalar(mul, 1)  # f32[32, 8]
        mul_1 = aten.mul.Tensor(arg0_1, rsub)  # f32[32, 8]
        t = aten.t.default(arg2_1)  # f32[8, 32] strides (1, 8)
        mm = aten.mm.default(t, mul_1)  # f32[8, 8]
        t_1 = aten.t.default(arg1_1)  # f32[8, 8] strides (1, 8)
        mm_1 = aten.mm.default(mul_1, t_1)  # f32[32, 8]
        mul_2 = aten.mul.Tensor(arg5_1, arg5_1)  # f32[32, 8]
        rsub_1 = aten.rsub.Scalar(mul_2, 1)  # f32[32, 8]
        mul_3 = aten.mul.Tensor(mm_1, rsub_1)  # f32[32, 8]
        t_2 = aten.t.default(arg4_1)  # f32[8, 32] strides (1, 8)
        mm_2 = aten.mm.default(t_2, mul_3)  # f32[8, 8]
        t_3 = aten.t.default(arg1_1)  # f32[8, 8] strides (1, 8)
        mm_3 = aten.mm.default(mul_3, t_3)  # f32[32, 8]
        mul_4 = aten.mul.Tensor(arg7_1, arg7_1)  # f32[32, 8]
        rsub_2 = aten.rsub.Scalar(mul_4, 1)  # f32[32, 8]
        mul_5 = aten.mul.Tensor(mm_3, rsub_2)  # f32[32, 8]
        t_4 = aten.t.default(arg6_1)  # f32[8, 32] strides (1, 8)
        mm_4 = aten.mm.default(t_4, mul_5)  # f32[8, 8]
        t_5 = aten.t.default(arg1_1)  # f32[8, 8] strides (1, 8)
        mm_5 = aten.mm.default(mul_5, t_5)  # f32[32, 8]
        mul_6 = aten.mul.Tensor(arg9_1, arg9_1)  # f32[32, 8]
        rsub_3 = aten.rsub.Scalar(mul_6, 1)  # f32[32, 8]
        mul_7 = aten.mul.Tensor(mm_5, rsub_3)  # f32[32, 8]
        t_6 = aten.t.default(arg8_1)  # f32[8, 32] strides (1, 8)
        mm_6 = aten.mm.default(t_6, mul_7)  # f32[8, 8]
        t_7 = aten.t.default(arg1_1)  # f32[8, 8] strides (1, 8)
        mm_7 = aten.mm.default(mul_7, t_7)  # f32[32, 8]
        return [mm, mm_2, mm_4, mm_6, mm_7]
        """,
        """
        arg0_1: f32[32, 8]
        arg1_1: f32[8, 8]
        arg2_1: f32[32, 8]
        arg3_1: f32[32, 8]
        arg4_1: f32[32, 8]
        arg5_1: f32[32, 8]
        arg6_1: f32[32, 8]
        arg7_1: f32[32, 8]
        arg8_1: f32[32, 8]
        arg9_1: f32[32, 8]
        mul = aten.mul.Tensor(arg3_1, arg3_1)  # f32[32, 8] | section=0
        rsub = aten.rsub.Scalar(mul, 1)  # f32[32, 8] | section=0
        mul_1 = aten.mul.Tensor(arg0_1, rsub)  # f32[32, 8] | section=0
        t = aten.t.default(arg2_1)  # f32[8, 32] strides (1, 8) | section=0
        mm = aten.mm.default(t, mul_1)  # f32[8, 8] | section=0
        t_1 = aten.t.default(arg1_1)  # f32[8, 8] strides (1, 8) | section=0
        mm_1 = aten.mm.default(mul_1, t_1)  # f32[32, 8] | section=0
        mul_2 = aten.mul.Tensor(arg5_1, arg5_1)  # f32[32, 8] | section=1
        rsub_1 = aten.rsub.Scalar(mul_2, 1)  # f32[32, 8] | section=1
        mul_3 = aten.mul.Tensor(mm_1, rsub_1)  # f32[32, 8] | section=1
        t_2 = aten.t.default(arg4_1)  # f32[8, 32] strides (1, 8) | section=1
        mm_2 = aten.mm.default(t_2, mul_3)  # f32[8, 8] | section=1
        t_3 = aten.t.default(arg1_1)  # f32[8, 8] strides (1, 8) | section=1
        mm_3 = aten.mm.default(mul_3, t_3)  # f32[32, 8] | section=1
        mul_4 = aten.mul.Tensor(arg7_1, arg7_1)  # f32[32, 8] | section=2
        rsub_2 = aten.rsub.Scalar(mul_4, 1)  # f32[32, 8] | section=2
        mul_5 = aten.mul.Tensor(mm_3, rsub_2)  # f32[32, 8] | section=2
        t_4 = aten.t.default(arg6_1)  # f32[8, 32] strides (1, 8) | section=2
        mm_4 = aten.mm.default(t_4, mul_5)  # f32[8, 8] | section=2
        t_5 = aten.t.default(arg1_1)  # f32[8, 8] strides (1, 8) | section=2
        mm_5 = aten.mm.default(mul_5, t_5)  # f32[32, 8] | section=2
        mul_6 = aten.mul.Tensor(arg9_1, arg9_1)  # f32[32, 8] | section=3
        rsub_3 = aten.rsub.Scalar(mul_6, 1)  # f32[32, 8] | section=3
        mul_7 = aten.mul.Tensor(mm_5, rsub_3)  # f32[32, 8] | section=3
        t_6 = aten.t.default(arg8_1)  # f32[8, 32] strides (1, 8) | section=3
        mm_6 = aten.mm.default(t_6, mul_7)  # f32[8, 8] | section=3
        t_7 = aten.t.default(arg1_1)  # f32[8, 8] strides (1, 8) | section=3
        mm_7 = aten.mm.default(mul_7, t_7)  # f32[32, 8] | section=3
        return [mm, mm_2, mm_4, mm_6, mm_7]
        """,
        gm,
        inputs=inputs,
    )


@pytest.mark.parametrize(
    ("most", "expected"), [(2, [4, 4]), (3, [3, 3, 2]), (5, [2, 2, 2, 2]), (8, [1] * 8), (100, [1] * 8)]
)
def test_a_section_is_of_whole_layers(most: int, expected: list[int]) -> None:
    gm, freed, _ = of_layers(8)
    CutIntoSections(freed, least=SAVED + 1, most=most)(gm)
    assert sections(gm) == [" ".join([LAYER] * count) for count in expected]


def test_a_section_frees_enough_bytes_to_repay_its_call() -> None:
    gm, freed, _ = of_layers(8)
    CutIntoSections(freed, least=4 * SAVED, most=100)(gm)
    assert sections(gm) == [" ".join([LAYER] * 2)] * 4
    gm, freed, _ = of_layers(8)
    assert_fx_untouched(CutIntoSections(freed, least=8 * SAVED + 1, most=100), gm)


def test_tensors_held_elsewhere_are_not_freed() -> None:
    gm, freed, _ = of_layers(4)
    assert_fx_untouched(CutIntoSections((), least=1, most=4), gm)
    CutIntoSections(freed[4:], least=2 * SAVED, most=4)(gm)
    assert sections(gm) == [" ".join([LAYER] * 3), LAYER]


def test_each_section_is_an_island_and_the_results_are_the_same() -> None:
    gm, freed, inputs = of_layers(4)
    expected = gm(*inputs)
    CutIntoSections(freed, least=1, most=4)(gm)
    segmented = islands(gm)
    assert len(segmented.islands) == 4
    torch.testing.assert_close(segmented.gm(*inputs), expected, rtol=0, atol=0)
    first, *others = [
        [n.target for n in island.graph.nodes if n.op != "output"] for island in segmented.islands.values()
    ]
    assert all(len(other) == len(first) for other in others)


@pytest.mark.parametrize("by_torch", [False, True])
def test_sections_end_where_torch_runs_the_next_node(by_torch: bool) -> None:
    def function(tangents: Tensor, weight: Tensor, *saved: Tensor) -> list[Tensor]:
        gradients = []
        for x in saved:
            product = tangents @ weight
            gradients.append(x.t() @ product)
            sine = product.sin()
            tangents = torch.atan2(sine, product.cos()) + sine  # two tensors pass the atan2, one the end of a layer
        return [*gradients, tangents]

    tangents, *saved = given(9)
    gm, freed = backward(function, tangents, torch.eye(WIDTH), *saved, freed=8)
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.atan2.default):
        node.meta |= {CHOSEN: "the test says so"} if by_torch else {}
    expected = gm(tangents, torch.eye(WIDTH), *saved)
    alone = len(islands(gm).islands)
    CutIntoSections(freed, least=2 * SAVED, most=100)(gm)
    segmented = islands(gm)
    torch.testing.assert_close(segmented.gm(tangents, torch.eye(WIDTH), *saved), expected, rtol=0, atol=0)
    first, last = "mm mm sin cos", "atan2 add"
    if by_torch:
        middle = f"add {first} {last} {first} atan2"
        assert sections(gm) == [f"{first} {last} {first} atan2", middle, middle, f"{middle} add"]
        assert alone == len(segmented.islands) == 9
    else:
        assert not any(section.endswith("atan2") for section in sections(gm))
        assert (alone, len(segmented.islands)) == (1, 4)


def test_an_end_hands_on_no_more_than_it_has_to() -> None:
    def function(tangents: Tensor, *saved: Tensor) -> list[Tensor]:
        wide = torch.cat([tangents * saved[0], tangents * saved[1]], 1)
        narrow = wide.sum(1)
        return [narrow * saved[2].sum(1), saved[3].sum(1)]

    tangents, *saved = given(5)
    gm, freed = backward(function, tangents, *saved, freed=4)
    pass_ = CutIntoSections(freed, least=2 * SAVED, most=2)
    assert_fx_rewrites(
        pass_,
        """
        arg0_1: f32[32, 8]
        arg1_1: f32[32, 8]
        arg2_1: f32[32, 8]
        arg3_1: f32[32, 8]
        arg4_1: f32[32, 8]
        mul = aten.mul.Tensor(arg0_1, arg1_1)  # f32[32, 8]
        mul_1 = aten.mul.Tensor(arg0_1, arg2_1)  # f32[32, 8]
        cat = aten.cat.default([mul, mul_1], 1)  # f32[32, 16]
        sum = aten.sum.dim_IntList(cat, [1])  # f32[32]
        sum_1 = aten.sum.dim_IntList(arg3_1, [1])  # f32[32]
        mul_2 = aten.mul.Tensor(sum, sum_1)  # f32[32]
        sum_2 = aten.sum.dim_IntList(arg4_1, [1])  # f32[32]
        return [mul_2, sum_2]
        """,
        """
        arg0_1: f32[32, 8]
        arg1_1: f32[32, 8]
        arg2_1: f32[32, 8]
        arg3_1: f32[32, 8]
        arg4_1: f32[32, 8]
        mul = aten.mul.Tensor(arg0_1, arg1_1)  # f32[32, 8] | section=0
        mul_1 = aten.mul.Tensor(arg0_1, arg2_1)  # f32[32, 8] | section=0
        cat = aten.cat.default([mul, mul_1], 1)  # f32[32, 16] | section=0
        sum = aten.sum.dim_IntList(cat, [1])  # f32[32] | section=0
        sum_1 = aten.sum.dim_IntList(arg3_1, [1])  # f32[32] | section=1
        mul_2 = aten.mul.Tensor(sum, sum_1)  # f32[32] | section=1
        sum_2 = aten.sum.dim_IntList(arg4_1, [1])  # f32[32] | section=1
        return [mul_2, sum_2]
        """,
        gm,
    )


def test_results_of_inputs_alone_are_computed_in_the_section_that_reads_them() -> None:
    def function(tangents: Tensor, *saved: Tensor) -> list[Tensor]:
        wide = [one.double() for one in saved[:3]]  # before all else, as casts stand in AOTAutograd's backwards
        turned = saved[3].t()
        results = [tangents * one for one in wide]
        return [*results, turned.exp()]

    tangents, *saved = given(5)
    gm, freed = backward(function, tangents, *saved, freed=4)
    pass_ = CutIntoSections(freed, least=1, most=4)
    assert_fx_rewrites(
        pass_,
        """
        arg0_1: f32[32, 8]
        arg1_1: f32[32, 8]
        arg2_1: f32[32, 8]
        arg3_1: f32[32, 8]
        arg4_1: f32[32, 8]
        _to_copy = aten._to_copy.default(arg1_1, dtype=f64)  # f64[32, 8]
        _to_copy_1 = aten._to_copy.default(arg2_1, dtype=f64)  # f64[32, 8]
        _to_copy_2 = aten._to_copy.default(arg3_1, dtype=f64)  # f64[32, 8]
        t = aten.t.default(arg4_1)  # f32[8, 32] strides (1, 8)
        mul = aten.mul.Tensor(arg0_1, _to_copy)  # f64[32, 8]
        mul_1 = aten.mul.Tensor(arg0_1, _to_copy_1)  # f64[32, 8]
        mul_2 = aten.mul.Tensor(arg0_1, _to_copy_2)  # f64[32, 8]
        exp = aten.exp.default(t)  # f32[8, 32] strides (1, 8)
        return [mul, mul_1, mul_2, exp]
        """,
        """
        arg0_1: f32[32, 8]
        arg1_1: f32[32, 8]
        arg2_1: f32[32, 8]
        arg3_1: f32[32, 8]
        arg4_1: f32[32, 8]
        _to_copy = aten._to_copy.default(arg1_1, dtype=f64)  # f64[32, 8] | section=0
        _to_copy_1 = aten._to_copy.default(arg2_1, dtype=f64)  # f64[32, 8] | section=1
        _to_copy_2 = aten._to_copy.default(arg3_1, dtype=f64)  # f64[32, 8] | section=2
        t = aten.t.default(arg4_1)  # f32[8, 32] strides (1, 8) | section=3
        mul = aten.mul.Tensor(arg0_1, _to_copy)  # f64[32, 8] | section=0
        mul_1 = aten.mul.Tensor(arg0_1, _to_copy_1)  # f64[32, 8] | section=1
        mul_2 = aten.mul.Tensor(arg0_1, _to_copy_2)  # f64[32, 8] | section=2
        exp = aten.exp.default(t)  # f32[8, 32] strides (1, 8) | section=3
        return [mul, mul_1, mul_2, exp]
        """,
        gm,
    )


def test_the_results_of_one_operator_stay_with_it() -> None:
    def function(tangents: Tensor, *saved: Tensor) -> list[Tensor]:
        values, places = torch.max(saved[0], 1)
        return [values * saved[1].sum(1), places, (tangents * saved[2]).sum(1) * values]

    tangents, *saved = given(4)
    gm, freed = backward(function, tangents, *saved, freed=3)
    expected = gm(tangents, *saved)
    CutIntoSections(freed, least=1, most=3)(gm)
    assert len(sections(gm)) == 3
    torch.testing.assert_close(islands(gm).gm(tangents, *saved), expected, rtol=0, atol=0)


def test_torchs_nodes_run_between_the_islands_of_a_section() -> None:
    gm, freed, inputs = of_layers(3)
    expected = gm(*inputs)
    CutIntoSections(freed, least=1, most=3)(gm)
    products = [node for node in gm.graph.nodes if node.target is torch.ops.aten.mm.default]
    segmented = segment(gm, lambda node: "torch's" if node is products[2] else None, torch.device("cpu"))
    torch.testing.assert_close(segmented.gm(*inputs), expected, rtol=0, atol=0)
    assert len(segmented.islands) == 3


def test_the_predicted_peak_falls_by_the_freed_bytes() -> None:
    forward = make_fx(lambda x: x, tracing_mode="fake")(torch.ones(1))
    gm, freed, _ = of_layers(8)
    _, whole = peaks(forward, gm)
    CutIntoSections(freed, least=1, most=8)(gm)
    _, cut = peaks(forward, gm)
    weight = WIDTH * WIDTH * 4
    transient = 3 * SAVED  # tangents, a layer's matmul, and its result after the pointwise operators
    assert whole >= 16 * SAVED + 9 * weight
    assert cut <= 16 * SAVED + weight + SAVED + transient
    assert whole - cut >= 6 * weight
