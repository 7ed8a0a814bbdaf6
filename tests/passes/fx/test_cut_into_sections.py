"""Graph before, marks after: where a backward is cut into sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.marks import SECTION
from ort_dynamo.passes.fx.analysis.memory import peaks
from ort_dynamo.passes.fx.cut_into_sections import CutIntoSections
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
    gm, freed, _ = of_layers(4)
    assert run_twice(CutIntoSections(freed, least=1, most=4), gm)
    assert sections(gm) == [LAYER] * 4


@pytest.mark.parametrize(
    ("most", "expected"), [(2, [4, 4]), (3, [3, 3, 2]), (5, [2, 2, 2, 2]), (8, [1] * 8), (100, [1] * 8)]
)
def test_a_section_is_of_whole_layers(most: int, expected: list[int]) -> None:
    gm, freed, _ = of_layers(8)
    CutIntoSections(freed, least=SAVED + 1, most=most)(gm)
    assert sections(gm) == [" ".join([LAYER] * count) for count in expected]


def test_a_section_frees_what_repays_a_call() -> None:
    gm, freed, _ = of_layers(8)
    CutIntoSections(freed, least=4 * SAVED, most=100)(gm)
    assert sections(gm) == [" ".join([LAYER] * 2)] * 4
    gm, freed, _ = of_layers(8)
    assert not run_twice(CutIntoSections(freed, least=8 * SAVED + 1, most=100), gm)
    assert sections(gm) == []


def test_what_others_hold_is_not_freed() -> None:
    gm, freed, _ = of_layers(4)
    assert not run_twice(CutIntoSections((), least=1, most=4), gm)
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


def test_an_end_hands_on_no_more_than_it_has_to() -> None:
    def function(tangents: Tensor, *saved: Tensor) -> list[Tensor]:
        wide = torch.cat([tangents * saved[0], tangents * saved[1]], 1)
        narrow = wide.sum(1)
        return [narrow * saved[2].sum(1), saved[3].sum(1)]

    tangents, *saved = given(5)
    gm, freed = backward(function, tangents, *saved, freed=4)
    CutIntoSections(freed, least=2 * SAVED, most=2)(gm)
    assert sections(gm) == ["mul mul cat sum", "sum mul sum"]


def test_what_reads_only_inputs_is_made_where_it_is_read() -> None:
    def function(tangents: Tensor, *saved: Tensor) -> list[Tensor]:
        wide = [one.double() for one in saved[:3]]  # before all else, as casts stand in AOTAutograd's backwards
        turned = saved[3].t()
        results = [tangents * one for one in wide]
        return [*results, turned.exp()]

    tangents, *saved = given(5)
    gm, freed = backward(function, tangents, *saved, freed=4)
    CutIntoSections(freed, least=1, most=4)(gm)
    assert sections(gm) == ["_to_copy mul"] * 3 + ["exp"]
    (turned,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.t.default)
    assert turned.meta[SECTION] == 3


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


def test_the_peak_that_is_predicted_falls_by_what_is_freed() -> None:
    forward = make_fx(lambda x: x, tracing_mode="fake")(torch.ones(1))
    gm, freed, _ = of_layers(8)
    _, whole = peaks(forward, gm)
    CutIntoSections(freed, least=1, most=8)(gm)
    _, cut = peaks(forward, gm)
    weight = WIDTH * WIDTH * 4
    transient = 3 * SAVED  # tangents, and a layer's product and what becomes of it
    assert whole >= 16 * SAVED + 9 * weight
    assert cut <= 16 * SAVED + weight + SAVED + transient
    assert whole - cut >= 6 * weight
