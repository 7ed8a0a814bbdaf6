"""Tests of the table of slower operators: which nodes are marked for torch, and which are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from run_twice import run_twice
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.graph.marks import CHOSEN
from ort_dynamo.lowering.registry import registered
from ort_dynamo.passes.fx.torch_graph.place_slower_operators import FILLS, PlaceSlowerOperators
from ort_dynamo.passes.fx.torch_graph.slower_operators import FORMS
from ort_dynamo.runtime.installed.providers import recorded_cpu_targets, recorded_cuda_targets
from ort_dynamo.targets.target import Target

aten = torch.ops.aten

_OLDER, _TARGET = recorded_cpu_targets()

FEW, MANY, VERY_MANY = (8, 32), (512, 512), (2048, 1024)
"""The cut costs more than FEW gain, and on several threads more than MANY gain."""


def chosen(
    function: Callable[..., Any],
    *tensors: Tensor | tuple[int, ...],
    threads: int = 1,
    mode: Literal["fake", "symbolic"] = "fake",
    target: Any = _TARGET,
) -> dict[str, str]:
    """Overload -> reason, of the marked nodes of the function's graph; a second run must change nothing."""
    given = [one if isinstance(one, Tensor) else torch.zeros(one) for one in tensors]
    gm = make_fx(function, tracing_mode=mode)(*given)
    modified = run_twice(PlaceSlowerOperators(target, threads), gm)
    found = {str(node.target): node.meta[CHOSEN] for node in gm.graph.nodes if CHOSEN in node.meta}
    assert modified == bool(found)
    return found


def between(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with work for a session on either side."""
    return lambda x, *others: function(x.exp(), *others).exp()


def test_an_operator_whose_gain_exceeds_the_cut_is_torchs() -> None:
    marked = chosen(between(torch.lgamma), MANY)
    assert marked == {"aten.lgamma.default": "ONNX Runtime takes 6.9 times as long"}
    assert not chosen(between(torch.lgamma), FEW)


def test_the_ratio_is_that_of_the_targets_runtime() -> None:
    assert chosen(between(torch.lgamma), MANY, target=_OLDER) == {
        "aten.lgamma.default": "ONNX Runtime takes 8.7 times as long"
    }


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, True), (False, False, True)])
def test_gradients_that_a_mask_leaves_out_have_no_elements(mask: tuple[bool, ...]) -> None:
    def backward(gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        found = aten.native_layer_norm_backward(gradient, x, [512], mean, scale, weight, weight, mask)
        return tuple(one for one in found if one is not None)

    given = (MANY, MANY, (512, 1), (512, 1), (512,))
    assert chosen(backward, *given) == {
        "aten.native_layer_norm_backward.default": "ONNX Runtime takes 3.4 times as long"
    }
    assert not chosen(lambda g, x, *others: backward(g.exp(), x, *others), *given)


def test_sizes_of_an_index_may_depend_on_data() -> None:
    def added(x: Tensor, mask: Tensor) -> Tensor:
        rows = mask.nonzero()
        one = x.scatter_add(0, rows, x.sum(1, keepdim=True)).scatter_add(0, rows.t(), x)
        return one.scatter_reduce(0, rows[:, :1].expand(-1, 512), x, "mean")

    assert not chosen(added, MANY, (512,), mode="symbolic")


def test_with_several_threads_a_following_session_raises_the_price_of_torch() -> None:
    assert chosen(between(torch.lgamma), VERY_MANY, threads=2)
    assert not chosen(between(torch.lgamma), MANY, threads=2)


def test_with_several_threads_an_operator_that_no_session_follows_is_torchs() -> None:
    def last(x: Tensor) -> Tensor:
        return x.exp().lgamma().t()

    assert chosen(last, MANY, threads=2)
    assert not chosen(last, FEW, threads=2)
    assert not chosen(lambda x: (x.exp().lgamma().t(), x.exp().lgamma() + 1), FEW, threads=2)


@pytest.mark.parametrize("threads", [1, 2])
def test_where_torch_can_run_all_there_is_no_cost(threads: int) -> None:
    assert set(chosen(lambda x: x.lgamma().t().flip(-1), FEW, threads=threads)) == {
        "aten.lgamma.default",
        "aten.flip.default",
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_no_graph_is_cut_for_an_operator_that_gains_less_than_a_boundary_costs(threads: int) -> None:
    assert set(chosen(torch.sign, FEW, threads=threads)) == {"aten.sign.default"}
    assert not chosen(between(torch.sign), VERY_MANY, threads=threads)
    assert not chosen(lambda x: x.exp().sign(), VERY_MANY, threads=threads)


def test_a_fill_is_torchs_where_torch_runs_all_else() -> None:
    assert chosen(lambda x: (x.sign(), torch.zeros_like(x)), FEW) == {
        "aten.sign.default": "ONNX Runtime takes 7.2 times as long",
        "aten.zeros_like.default": FILLS,
    }
    assert not chosen(lambda x: (x.exp().sign(), torch.zeros_like(x)), FEW)


def test_symbolic_sizes_are_those_of_the_example() -> None:
    assert chosen(between(torch.lgamma), MANY, mode="symbolic")
    assert not chosen(between(torch.lgamma), FEW, mode="symbolic")


def test_zeros_that_only_such_an_operator_reads_go_with_it() -> None:
    def gradient(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros(MANY).scatter_add(-1, index, x.exp())

    index = torch.zeros(MANY, dtype=torch.int64)
    assert chosen(gradient, MANY, index)["aten.zeros.default"] == FILLS
    assert not chosen(gradient, FEW, torch.zeros(FEW, dtype=torch.int64))

    def read_elsewhere(x: Tensor, index: Tensor) -> Any:
        zeros = torch.zeros(MANY)
        return zeros.scatter_add(-1, index, x.exp()), zeros + x

    assert set(chosen(read_elsewhere, MANY, index)) == {"aten.scatter_add.default"}


INDEX = torch.zeros(MANY, dtype=torch.int64)
ROWS = torch.zeros(512, dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "nearest_other", "others"),
    [
        (lambda x: x.cumprod(-1), lambda x: x.cumprod(0), ()),
        (lambda x: x.cummax(1)[0], lambda x: x.cummax(0)[0], ()),
        (lambda x: x.cumsum(1), lambda x: x.cumsum(0), ()),
        (lambda x: x.prod(-1), lambda x: x.prod(0), ()),
        (lambda x: x.flip(0, 1), lambda x: x.flip(0), ()),
        (lambda x: x % 0.7, lambda x: x.fmod(0.7), ()),
        (lambda x: x % 0.7, lambda x: x.double() % 0.7, ()),
        (lambda x: x.lgamma(), lambda x: x.bfloat16().lgamma(), ()),
        (lambda x, i: x.scatter_add(1, i, x), lambda x, i: x.scatter_add(0, i, x), (INDEX,)),
        (
            lambda x, i: x.scatter_add(0, i[:, None].expand_as(x), x),
            lambda x, i: x.scatter_add(0, i[:, None], x),
            (ROWS,),
        ),
        (
            lambda x, i: x.scatter_reduce(0, i[:, None].expand_as(x), x, "mean"),
            lambda x, i: x.scatter_reduce(0, i.expand_as(x).t().contiguous(), x, "mean"),
            (ROWS,),
        ),
        (lambda x, i: x.scatter(1, i, x), lambda x, i: x.scatter(1, i, x, reduce="add"), (INDEX,)),
        (lambda x, i: x.index_add(1, i, x), lambda x, i: x[0].index_add(0, i, x[0]), (ROWS,)),
        (lambda x, i: x.index_reduce(1, i, x, "amax"), lambda x, i: x[0].index_reduce(0, i, x[0], "amax"), (ROWS,)),
        (lambda x, i: x.index_copy(1, i, x), lambda x, i: x.index_copy(0, i, x), (ROWS,)),
        (
            lambda x: F.fold(x[:504], (33, 65), 3, stride=2),
            lambda x: F.fold(x[:504], (18, 34), 3),
            (),
        ),
        (
            lambda x, i: aten.index_put(x, [i], x, True),
            lambda x, i: aten.index_put(x, [i], x),
            (ROWS,),
        ),
        (
            lambda x: sum(aten.adaptive_max_pool2d(x[None, None], [4, 4])),
            lambda x: aten.adaptive_max_pool2d(x[None, None], [4, 4])[0],
            (),
        ),
    ],
)
def test_only_forms_that_were_measured_are_chosen(
    function: Callable[..., Tensor], nearest_other: Callable[..., Tensor], others: tuple[Tensor, ...]
) -> None:
    assert chosen(between(function), MANY, *others)
    assert not chosen(between(nearest_other), MANY, *others)


@pytest.mark.parametrize(
    ("function", "nearest_other"),
    [
        (lambda x: torch.linalg.vector_norm(x, dim=-1), lambda x: torch.linalg.vector_norm(x, dim=0)),
        (lambda x: torch.linalg.vector_norm(x, dim=-1), lambda x: torch.linalg.vector_norm(x, 1, dim=-1)),
        (lambda x: torch.linalg.vector_norm(x, dim=-1), lambda x: torch.linalg.vector_norm(x)),
        (lambda x: x.prod(), lambda x: x.double().prod()),
        (lambda x: torch.sign(x), lambda x: x.bfloat16().sign()),
        (lambda x: x[:, None].expand(-1, 2, -1).clone(), lambda x: x.t().clone()),
    ],
)
def test_alone_only_forms_that_were_measured_are_chosen(
    function: Callable[..., Tensor], nearest_other: Callable[..., Tensor]
) -> None:
    assert chosen(function, MANY)
    assert not chosen(nearest_other, MANY)


def test_embedding_bags_are_priced_by_their_indices() -> None:
    def bags(table: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
        found: Tensor = aten._embedding_bag(table.exp(), rows, starts)[0]
        return found.exp()

    starts = torch.arange(0, 8, 4)
    many = torch.zeros(4096, dtype=torch.int64)
    assert chosen(bags, (4096, 64), many, starts)
    assert not chosen(bags, (4096, 64), many[:8], starts)


@pytest.mark.parametrize("target", recorded_cpu_targets(), ids=lambda target: target.version)
def test_every_price_has_its_form(target: Target) -> None:
    assert target.prices.operators is not None
    assert target.prices.operators.slower.keys() == FORMS.keys()


def test_another_price_decides_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = _TARGET.prices
    assert prices.operators is not None
    dear = dataclasses.replace(prices.operators, cut=2 * 512 * 512 * 16)
    monkeypatch.setattr(Target, "prices", dataclasses.replace(prices, operators=dear))
    assert not chosen(between(torch.lgamma), MANY)
    monkeypatch.setattr(Target, "prices", dataclasses.replace(prices, operators=None))
    assert not chosen(torch.lgamma, MANY)


@pytest.mark.parametrize("overload", FORMS, ids=str)
def test_operators_in_the_table_have_lowerings(overload: Any) -> None:
    assert overload in registered()


def test_a_file_that_stands_alone_is_whole() -> None:
    assert not chosen(torch.lgamma, MANY, target=dataclasses.replace(_TARGET, stands_alone=True))


def test_nothing_was_measured_on_another_device() -> None:
    cuda = recorded_cuda_targets()[-1]
    assert not chosen(torch.lgamma, VERY_MANY, target=cuda)
