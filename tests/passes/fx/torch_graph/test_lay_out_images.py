"""Graph before, graph after: which tensors between convolutions have their channels last, and who computes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.marks import CHANNELS_LAST, CHOSEN
from ort_dynamo.passes.fx.torch_graph.batch_norm_sums import FORWARD, GRADIENTS
from ort_dynamo.passes.fx.torch_graph.lay_out_images import LayOutImages
from ort_dynamo.torch_internals.operators import aten

CLONE = "aten.clone.default"


def convolution(x: Tensor, w: Tensor, stride: int = 1) -> Tensor:
    return aten.convolution(x, w, None, [stride] * 2, [w.shape[-1] // 2] * 2, [1, 1], False, [0, 0], 1)


def laid_out(function: Callable[..., Any], *inputs: Tensor, tracing_mode: str = "fake") -> GraphModule:
    """The graph of a function after the pass: it computes the same, and a second run changes nothing."""
    gm = make_fx(function, tracing_mode=tracing_mode)(*inputs)
    expected = gm(*inputs)
    run_twice(LayOutImages(), gm)
    if tracing_mode == "fake":
        torch.testing.assert_close(gm(*inputs), expected, rtol=1e-4, atol=1e-4)
    return gm


def counted(gm: GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in gm.graph.nodes if node.op == "call_function")


def chosen(gm: GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in gm.graph.nodes if CHOSEN in node.meta)


def of(gm: GraphModule, target: Any) -> list[Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X, W, SMALL = random(2, 4, 8, 8), random(8, 4, 3, 3), random(8, 8, 1, 1)


def test_what_stands_between_two_convolutions_has_its_channels_last() -> None:
    gm = laid_out(lambda x, w, v: convolution(F.relu(convolution(x, w) * 2), v), X, W, SMALL)
    (mul,) = of(gm, aten.mul.Tensor)
    assert mul.meta["val"].shape == (2, 8, 8, 8)
    assert mul.meta["val"].is_contiguous()
    assert counted(gm)[CLONE] == 3  # the image and its weight on the way in, the result on the way out
    assert chosen(gm) == {"aten.convolution.default": 2, CLONE: 1}
    for node in of(gm, aten.convolution.default):
        assert node.meta[CHANNELS_LAST] == {0}
        assert node.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr]


def test_a_weight_is_laid_out_once_and_as_it_is_cast() -> None:
    def twice(x: Tensor, w: Tensor) -> Tensor:
        half = w.bfloat16()
        return convolution(F.relu(convolution(x.bfloat16(), half)), half)

    gm = laid_out(twice, random(2, 4, 8, 8), random(4, 4, 3, 3))
    casts = [node for node in of(gm, aten._to_copy.default) if node.meta["val"].dim() == 4]
    (cast,) = (node for node in casts if node.kwargs.get("memory_format") == torch.channels_last)
    assert [node.args[1] for node in of(gm, aten.convolution.default)] == [cast, cast]


def test_a_batch_norm_becomes_sums_and_arithmetic() -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, variance: Tensor) -> Any:
        x = convolution(x, w)
        return aten._native_batch_norm_legit_functional(x, scale, shift, mean, variance, True, 0.1, 1e-5)

    vectors = [random(8).abs() + 1 for _ in range(4)]
    gm = laid_out(function, X, W, *vectors)
    assert not any(node.target in FORWARD for node in gm.graph.nodes)
    assert counted(gm)["aten.sum.dim_IntList"] == 3  # of places, for the shift; of the rest, and of its squares


def test_its_gradient_becomes_sums_and_arithmetic() -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, gradient: Tensor) -> Any:
        x = convolution(x, w)
        _, mean, deviation = aten._native_batch_norm_legit.no_stats(x, scale, None, True, 0.1, 1e-5)
        given = (gradient, x, scale, None, None, mean, deviation, True, 1e-5, [True, True, True])
        return aten.native_batch_norm_backward(*given)

    gm = laid_out(function, X, W, random(8), random(2, 8, 8, 8))
    assert not any(node.target in FORWARD or node.target in GRADIENTS for node in gm.graph.nodes)


def test_a_batch_norm_in_eval_is_left_alone() -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, mean: Tensor, variance: Tensor) -> Any:
        x = convolution(x, w)
        return aten._native_batch_norm_legit_functional(x, scale, scale, mean, variance, False, 0.1, 1e-5)

    vectors = [random(8).abs() + 1 for _ in range(3)]
    gm = laid_out(function, X, W, *vectors)
    assert [node.target for node in gm.graph.nodes if node.target in FORWARD]


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_as_exact_as_torchs(dtype: torch.dtype, offset: float) -> None:
    """The first image lies elsewhere than the others, and the mean far from 0."""
    x = random(8, 4, 16, 16) + offset
    x[0] += 10
    x, w = x.to(dtype), torch.eye(4)[:, :, None, None].to(dtype)

    def function(x: Tensor, w: Tensor, scale: Tensor, mean: Tensor, variance: Tensor) -> Any:
        x = convolution(x, w)
        return aten._native_batch_norm_legit_functional(x, scale, scale, mean, variance, True, 1.0, 1e-5)

    given = x, w, torch.ones(4), torch.zeros(4), torch.ones(4)
    gm = make_fx(function, tracing_mode="fake")(*given)
    eager = gm(*given)[3:]  # with this momentum, the mean and the variance, which are float32
    run_twice(LayOutImages(), gm)
    ours = gm(*given)[3:]
    exact = x.double()
    for value, other, true in zip(ours, eager, (exact.mean((0, 2, 3)), exact.var((0, 2, 3))), strict=True):
        error, own = ((one.double() - true).abs().max() / true.abs().max() for one in (value, other))
        assert error <= max(2 * own, 4e-6)  # 32 units in the last place: the CPU's sum adds in order


def test_pools_run_in_torch_and_keep_the_layout() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        pooled, _ = aten.max_pool2d_with_indices(convolution(x, w), [2, 2], [2, 2])
        return convolution(pooled + 1, v)

    gm = laid_out(function, X, W, SMALL)
    assert chosen(gm)["aten.max_pool2d_with_indices.default"] == 1
    assert counted(gm)[CLONE] == 3


def test_what_reads_an_image_otherwise_reads_it_as_it_was_traced() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = F.relu(convolution(x, w))
        return aten.view(y, [2, 4, -1]).cumsum(-1)

    gm = laid_out(function, X, W)
    (view,) = of(gm, aten.view.default)
    assert view.args[0].meta["val"].is_contiguous()  # type: ignore[union-attr]


def test_a_programs_own_permutations_cost_nothing() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = convolution(x, w).permute(0, 2, 3, 1)
        return convolution(convolution(x, w) + F.layer_norm(y, (8,)).permute(0, 3, 1, 2), v)

    assert counted(laid_out(function, X, W, SMALL))[CLONE] == 3


def test_tokens_of_patches_cost_nothing() -> None:
    gm = laid_out(lambda x, w: F.layer_norm(convolution(x, w).flatten(2).transpose(1, 2), (8,)), X, W)
    assert counted(gm)[CLONE] == 2  # the image and the weight


def test_the_gradient_of_a_mean_has_its_channels_last() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor, g: Tensor) -> Tensor:
        mean = g.expand(2, 8, 8, 8) / 64
        return convolution(mean * F.relu(convolution(x, w)), v)

    gm = laid_out(function, X, W, SMALL, random(2, 8, 1, 1))
    (divided,) = of(gm, aten.div.Tensor)
    assert divided.meta["val"].shape == (2, 8, 8, 8)
    assert divided.args[0].target is aten.expand.default  # type: ignore[union-attr]
    assert counted(gm)[CLONE] == 3


def test_an_expanded_image_is_convolved() -> None:
    gm = laid_out(lambda g, w: convolution(g.expand(2, 8, 8, 8), w), random(2, 8, 1, 1), random(4, 8, 3, 3))
    assert counted(gm)[CLONE] == 3


def test_views_of_what_follows_stay_possible() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = torch.exp(convolution(x, w).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # in memory as the convolution is
        return aten.view(y, [2, -1]) + aten.view(convolution(y, v), [2, -1])

    laid_out(function, X, W, SMALL)


def test_joined_and_sliced_channels_stay_last() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = convolution(x, w)
        return convolution(torch.cat([y[:, 4:], y[:, :4]], 1) * y.mean((2, 3), keepdim=True), v)

    gm = laid_out(function, X, W, SMALL)
    (joined,) = of(gm, aten.cat.default)
    assert joined.args[1] == 3
    assert counted(gm)[CLONE] == 3


def test_a_program_in_channels_last_is_not_copied() -> None:
    gm = laid_out(
        lambda x, w, v: convolution(F.relu(convolution(x, w)), v),
        *(one.contiguous(memory_format=torch.channels_last) for one in (X, W, SMALL)),
    )
    assert not counted(gm)[CLONE]


def test_results_share_memory_as_they_did() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        y = convolution(x, w)
        return y, y[..., :-1], y.permute(0, 2, 3, 1), F.relu(y)

    gm = laid_out(function, X, W)
    whole, part, permuted, other = gm(X, W)
    assert whole.is_contiguous()
    assert part.data_ptr() == whole.data_ptr() == permuted.data_ptr() != other.data_ptr()


def test_sizes_have_to_be_known() -> None:
    gm = laid_out(lambda x, w: convolution(x, w), X, W, tracing_mode="symbolic")
    assert not chosen(gm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_types_are_left_alone(dtype: torch.dtype) -> None:
    gm = make_fx(lambda x, w: convolution(x, w), tracing_mode="fake")(X.to(dtype), W.to(dtype))
    assert not run_twice(LayOutImages(), gm)


def test_float32_is_left_alone_without_tf32() -> None:
    backend: Any = torch.backends.cudnn.conv
    before = backend.fp32_precision
    backend.fp32_precision = "ieee"
    try:
        assert not run_twice(LayOutImages(), make_fx(lambda x, w: convolution(x, w), tracing_mode="fake")(X, W))
    finally:
        backend.fp32_precision = before


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_gradient_of_a_weight_is_laid_out_as_the_weight(layout: torch.memory_format) -> None:
    gradient, x, w = random(2, 8, 8, 8), X, W.contiguous(memory_format=layout)

    def function(g: Tensor, x: Tensor, w: Tensor) -> Any:
        given = (g * 2, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        result = aten.convolution_backward(*given)
        return result[0], result[1]

    gm = laid_out(function, gradient, x, w)
    ours = gm(gradient, x, w)
    assert ours[1].is_contiguous(memory_format=layout)
    assert ours[0].stride() == function(gradient, x, w)[0].stride()
