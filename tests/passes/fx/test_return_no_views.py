"""Results that a program may write to, as eager's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.analysis.aliases import returned_views
from ort_dynamo.passes.fx.return_no_views import ReturnNoViews

LARGE = (2, 30, 40, 50)  # larger than the results that are always copied into torch's memory


def test_a_computed_result_is_returned_as_no_view_and_shares_its_memory() -> None:
    gm = assert_fx_rewrites(
        ReturnNoViews(slice(None)),
        """
        x: f32[2, 3]
        add = aten.add.Tensor(x, 1)  # f32[2, 3]
        t = aten.t.default(add)  # f32[3, 2] strides (1, 3)
        return [t, x]
        """,
        """
        x: f32[2, 3]
        add = aten.add.Tensor(x, 1)  # f32[2, 3]
        t = aten.t.default(add)  # f32[3, 2] strides (1, 3)
        unviewed = unviewed(t)  # f32[3, 2] strides (1, 3)
        return [unviewed, x]
        """,
    )
    with torch.no_grad():
        result, given = gm(x := torch.ones(2, 3))
    assert not result._is_view()
    assert result.stride() == (1, 3)
    assert given is x


@pytest.mark.parametrize("pass_", [ReturnNoViews(slice(0)), ReturnNoViews(slice(None), frozenset({0}))], ids=str)
def test_others_stay(pass_: ReturnNoViews) -> None:
    gm = make_fx(lambda x: [(x + 1).t()], tracing_mode="fake")(torch.ones(2, 3))
    assert_fx_untouched(pass_, gm)


def test_views_of_eager_are_told_from_reshapes_that_are_none() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [
            x + 1,
            (x + 1).t(),
            (x + 1).split(1)[0],
            torch.ops.aten._unsafe_view(x + 1, [6]),
            x,
            x.relu(),
            (x + 1).t().cos(),
        ]

    gm = make_fx(function, tracing_mode="fake")(torch.ones(2, 3))
    (detached,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    detached.target = torch.ops.aten.detach.default  # torch 2.15 would trace an alias here
    assert returned_views(gm.graph) == {1, 2}


OWN = {
    "max_unpool2d": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "max_unpool3d": lambda x: F.max_unpool3d(*F.max_pool3d(x, (1, 2, 2), return_indices=True), (1, 2, 2)),
    "rot90": lambda x: torch.rot90(x, 1, (2, 3)),
    "triangular_solve": lambda x: torch.triangular_solve(x, x)[1],
}


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
@pytest.mark.parametrize("name", OWN)
def test_a_decompositions_result_can_be_written_in_place(name: str, placement: str) -> None:
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    result = torch.compile(OWN[name], backend="ort_train", options={"placement": placement})(x)
    expected = OWN[name](x)
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result, expected)
    result.add_(1)
    (ours,), (theirs,) = (torch.autograd.grad(one.sum(), x) for one in (result, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_a_detached_result_is_no_view_and_counts_writes(placement: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y.flatten(1).detach(), y.sum()

    compiled = torch.compile(function, backend="ort_train", options={"placement": placement})
    detached, loss = compiled(torch.randn(LARGE, requires_grad=True))
    assert not detached._is_view()
    detached.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_a_pool_to_one_pixel_is_no_view(placement: str) -> None:
    x = torch.randn(2, 8, 5, 8).to(memory_format=torch.channels_last)
    pooled = torch.compile(F.adaptive_avg_pool2d, backend="ort_train", options={"placement": placement})(x, 1)
    assert not pooled._is_view()
    assert pooled.stride() == F.adaptive_avg_pool2d(x, 1).stride()
    viewed = torch.compile(lambda x: (x + 1).as_strided((4, 2), (1, 4)), backend="ort_train")(torch.ones(8))
    assert viewed._is_view()


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x.sin() * 2,
        lambda x, w: F.conv2d(x, w).transpose(2, 3) * 2,
        lambda x, w: F.conv2d(x, w).permute(0, 2, 3, 1).contiguous(),
        lambda x, w: (F.conv2d(x, w) * 2).transpose(1, 2),
    ],
)
def test_results_can_be_written_to_as_eagers(function: Callable[..., Tensor], placement: str) -> None:
    x = torch.randn(LARGE).to(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(4, 30, 3, 3, requires_grad=True)

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        (found,) = torch.autograd.grad(call(x, weight).mul_(2).square().mean(), x)
        return found / found.abs().max()

    compiled = torch.compile(function, backend="ort_train", options={"placement": placement})
    torch.testing.assert_close(gradient(compiled), gradient(function), rtol=0, atol=1e-5)
    with torch.no_grad():
        result, expected = compiled(x, weight), function(x, weight)
    assert result._is_view() == expected._is_view()


@pytest.mark.parametrize("options", [{}, {"placement": "onnxruntime"}], ids=str)
@pytest.mark.parametrize("name", ["log_sigmoid", "pow", "float_power"])
def test_a_view_of_a_result_whose_layout_fake_tensors_do_not_know_can_be_written_to(
    name: str, options: dict[str, str]
) -> None:
    calls = {"log_sigmoid": F.logsigmoid, "pow": partial(torch.pow, 2.0)}
    call = calls.get(name, partial(torch.float_power, 2.0))

    def flat(x: Tensor) -> Tensor:
        return call(x).flatten(1)  # a copy by the fake tensor's strides, and a view

    images = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    runs = flat, torch.compile(flat, backend="ort_train", options=options)
    expected, found = (run(images.clone().requires_grad_()).add_(1) for run in runs)
    torch.testing.assert_close(found, expected)
