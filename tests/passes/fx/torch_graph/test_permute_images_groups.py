"""Group norms and instance norms between convolutions become sums for each image and arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from image_graphs import CHOSEN, CLOSE, IN_TORCH, PADDED, W, X, assert_permuted, convolution, random, traced
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from ort_dynamo.passes.fx.torch_graph.permute_images import PermuteImages
from ort_dynamo.testing import TOLERANCES, assert_close
from ort_dynamo.torch_internals.kernels.operators import aten

NORMS = (aten.native_group_norm.default, aten.native_group_norm_backward.default)


def test_a_group_norm_becomes_sums_and_arithmetic() -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor) -> Any:
        return aten.native_group_norm(convolution(x, w), scale, None, 2, 8, 64, 4, 1e-5)

    assert_permuted(
        function,
        (X, W, random(8)),
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        scale_1: f32[8]
        convolution = aten.convolution.default(x_1, w_1, {PADDED})  # f32[2, 8, 8, 8]
        native_group_norm = aten.native_group_norm.default(convolution, scale_1, None, 2, 8, 64, 4, 1e-05)
        getitem = native_group_norm[0]  # f32[2, 8, 8, 8]
        getitem_1 = native_group_norm[1]  # f32[2, 4]
        getitem_2 = native_group_norm[2]  # f32[2, 4]
        return (getitem, getitem_1, getitem_2)
        """,
        f"""
        x_1: f32[2, 4, 8, 8]
        w_1: f32[8, 4, 3, 3]
        scale_1: f32[8]
        permute = aten.permute.default(x_1, [0, 2, 3, 1])  # f32[2, 8, 8, 4] strides (256, 8, 1, 64)
        clone = aten.clone.default(permute, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 4]
        permute_1 = aten.permute.default(clone, [0, 3, 1, 2])  # f32[2, 4, 8, 8] channels_last
        clone_1 = aten.clone.default(w_1, memory_format=torch.channels_last)  # f32[8, 4, 3, 3] channels_last | {CHOSEN}
        convolution = aten.convolution.default(permute_1, clone_1, {PADDED})
            # f32[2, 8, 8, 8] channels_last | {IN_TORCH}
        permute_2 = aten.permute.default(convolution, [0, 2, 3, 1])  # f32[2, 8, 8, 8]
        view = aten.view.default(permute_2, [2, 8, 8, 4, 2])  # f32[2, 8, 8, 4, 2]
        sum = aten.sum.dim_IntList(view, [1, 2])  # f32[2, 4, 2]
        sum_1 = aten.sum.dim_IntList(sum, [2])  # f32[2, 4]
        mul = aten.mul.Tensor(sum_1, 0.0078125)  # f32[2, 4]
        view_1 = aten.view.default(mul, [2, 1, 1, 4, 1])  # f32[2, 1, 1, 4, 1]
        sub = aten.sub.Tensor(view, view_1)  # f32[2, 8, 8, 4, 2]
        mul_1 = aten.mul.Tensor(sub, sub)  # f32[2, 8, 8, 4, 2]
        sum_2 = aten.sum.dim_IntList(sub, [1, 2])  # f32[2, 4, 2]
        sum_3 = aten.sum.dim_IntList(sum_2, [2])  # f32[2, 4]
        mul_2 = aten.mul.Tensor(sum_3, 0.0078125)  # f32[2, 4]
        sum_4 = aten.sum.dim_IntList(mul_1, [1, 2])  # f32[2, 4, 2]
        sum_5 = aten.sum.dim_IntList(sum_4, [2])  # f32[2, 4]
        mul_3 = aten.mul.Tensor(sum_5, 0.0078125)  # f32[2, 4]
        add = aten.add.Tensor(mul, mul_2)  # f32[2, 4]
        mul_4 = aten.mul.Tensor(mul_2, mul_2)  # f32[2, 4]
        sub_1 = aten.sub.Tensor(mul_3, mul_4)  # f32[2, 4]
        relu = aten.relu.default(sub_1)  # f32[2, 4]
        add_1 = aten.add.Tensor(relu, 1e-05)  # f32[2, 4]
        rsqrt = aten.rsqrt.default(add_1)  # f32[2, 4]
        view_2 = aten.view.default(mul_2, [2, 1, 1, 4, 1])  # f32[2, 1, 1, 4, 1]
        sub_2 = aten.sub.Tensor(sub, view_2)  # f32[2, 8, 8, 4, 2]
        view_3 = aten.view.default(rsqrt, [2, 1, 1, 4, 1])  # f32[2, 1, 1, 4, 1]
        mul_5 = aten.mul.Tensor(sub_2, view_3)  # f32[2, 8, 8, 4, 2]
        view_4 = aten.view.default(scale_1, [4, 2])  # f32[4, 2]
        mul_6 = aten.mul.Tensor(mul_5, view_4)  # f32[2, 8, 8, 4, 2]
        view_5 = aten.view.default(mul_6, [2, 8, 8, 8])  # f32[2, 8, 8, 8]
        permute_3 = aten.permute.default(view_5, [0, 3, 1, 2])  # f32[2, 8, 8, 8] channels_last
        clone_2 = aten.clone.default(permute_3, memory_format=torch.contiguous_format)  # f32[2, 8, 8, 8]
        return (clone_2, add, rsqrt)
        """,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("wanted", [[True, True, True], [True, False, False], [False, True, True]])
@pytest.mark.parametrize("scaled", [True, False])
def test_its_gradients_are_torchs(dtype: torch.dtype, groups: int, wanted: list[bool], scaled: bool) -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, gradient: Tensor) -> Any:
        x, weight = convolution(x, w), scale if scaled else None
        result, mean, deviation = aten.native_group_norm(x, weight, None, 2, 8, 64, groups, 1e-5)
        given = (
            gradient,
            x,
            mean,
            deviation,
            weight,
            2,
            8,
            64,
            groups,
            [one and (scaled or n == 0) for n, one in enumerate(wanted)],
        )
        gradients = aten.native_group_norm_backward(*given)
        return result, *(one for one, is_wanted in zip(gradients, given[-1], strict=True) if is_wanted)

    given = [one.to(dtype) for one in (X, W, random(8), random(2, 8, 8, 8))]
    gm = traced(function, *given)
    gm.graph.eliminate_dead_code()  # gradients that are None
    assert run_twice(PermuteImages(), gm)
    assert not any(gm.graph.find_nodes(op="call_function", target=target) for target in NORMS)
    double = function(*(one.double() for one in given))
    for after, right in zip(gm(*given), double, strict=True):
        assert after.dtype == dtype
        tolerance = CLOSE if dtype == torch.float32 else TOLERANCES[dtype]
        assert_close(after, right.to(dtype), "result", tolerance)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_its_variance_is_as_exact_as_torchs(offset: float) -> None:
    """The mean lies far from 0, and one image elsewhere than the others."""
    x = random(4, 4, 16, 16) + offset
    x[0] += 10

    def function(x: Tensor, w: Tensor) -> Any:
        return aten.native_group_norm(convolution(x, w), None, None, 4, 4, 256, 2, 1e-5)

    given = x, torch.eye(4)[:, :, None, None]
    gm = traced(function, *given)
    eager = gm(*given)[2]
    run_twice(PermuteImages(), gm)
    exact = (x.double().view(4, 2, -1).var(2, correction=0) + 1e-5).rsqrt()
    error, own = ((one.double() - exact).abs().max() / exact.abs().max() for one in (gm(*given)[2], eager))
    assert error <= max(2 * own, 4e-6)


def test_a_group_norm_of_rows_is_left_alone() -> None:
    def rows(x: Tensor, w: Tensor) -> Any:
        image = convolution(x, w)
        return aten.native_group_norm(image.flatten(2).sum(2)[:, :, None], None, None, x.shape[0], 8, 1, 2, 1e-5)

    gm = traced(rows, X, W)
    run_twice(PermuteImages(), gm)
    assert gm.graph.find_nodes(op="call_function", target=NORMS[0])


@pytest.mark.parametrize("norm", ["group", "instance"])
@pytest.mark.parametrize("less", [0, 1])
def test_a_norm_of_a_symbolic_batch_becomes_sums(norm: str, less: int, joint_graph: Callable[..., GraphModule]) -> None:
    """With one image less, the batch may be a single image."""

    def function(w: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        image = convolution(x[less:], w)
        normed = F.group_norm(image, 4, scale) if norm == "group" else F.instance_norm(image, weight=scale)
        return (normed.relu() * normed.square()).sum()

    torch._dynamo.mark_dynamic(x := torch.cat([X, X]), 0)
    given = [one.requires_grad_() for one in (W.clone(), x, random(8))]
    gm = joint_graph(function, *given)
    assert run_twice(PermuteImages(), gm)
    targets = {node.target for node in gm.graph.nodes}
    assert not targets & {*NORMS, aten._native_batch_norm_legit.no_stats, aten.native_batch_norm_backward.default}
    inputs = [one.detach().requires_grad_() for one in (W, random(5, *X.shape[1:]), given[2])]
    loss = function(*inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    by_shape = {one.shape[1:]: one for one in inputs}
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")[:-1]]
    given = [5 if isinstance(one, torch.SymInt) else by_shape[one.shape[1:]] for one in fakes]
    found = [one for one in tree_leaves(gm(given, [torch.tensor(1.0)])) if isinstance(one, Tensor)]
    gradients = [one.grad for one in given if isinstance(one, Tensor)]
    for ours, right in zip(found, [loss, *gradients], strict=True):
        assert right is not None
        assert_close(ours, right, "result", CLOSE)


def instance_normed(w: Tensor, x: Tensor, *vectors: Tensor) -> Tensor:
    """Dynamo makes inputs in this order, since the size of the weight is read first."""
    normed = F.instance_norm(convolution(x, w), None, None, *vectors)
    return (normed.relu() * normed.square()).sum(dtype=torch.promote_types(x.dtype, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vectors", [0, 1, 2])
def test_an_instance_norm_is_a_group_norm_of_each_channel(
    dtype: torch.dtype, vectors: int, joint_graph: Callable[..., GraphModule]
) -> None:
    given = [one.to(dtype, copy=True) for one in (W, X)] + [random(8) for _ in range(vectors)]
    exact = [one.double().requires_grad_() for one in given]
    loss = instance_normed(*exact)
    loss.backward()  # type: ignore[no-untyped-call]
    given = [one.requires_grad_() for one in given]
    gm = joint_graph(instance_normed, *given)
    inputs = given, [torch.tensor(1.0)]
    before = tree_leaves(gm(*inputs))
    assert run_twice(PermuteImages(), gm)
    targets = {node.target for node in gm.graph.nodes}
    assert not targets & {*NORMS, aten._native_batch_norm_legit.no_stats, aten.native_batch_norm_backward.default}
    right = [loss, *(one.grad for one in exact)]
    for ours, theirs, true in zip(tree_leaves(gm(*inputs)), before, right, strict=True):
        assert ours.dtype == theirs.dtype
        assert true is not None
        error, own = ((one.double() - true).abs().max() for one in (ours, theirs))
        assert error <= 2 * own + 1e-5 * true.abs().max()


def test_a_group_norm_of_rows_that_are_a_view_of_an_image_sums_their_groups() -> None:
    def function(x: Tensor, w: Tensor, scale: Tensor, gradient: Tensor) -> Any:
        rows = convolution(x, w).mean((2, 3), keepdim=True).view(2, 8)
        result, mean, deviation = aten.native_group_norm(rows, scale, scale, 2, 8, 1, 2, 1e-5)
        given = gradient, rows, mean, deviation, scale, 2, 8, 1, 2, [True, True, True]
        return result, *aten.native_group_norm_backward(*given)

    given = X, W, random(8), random(2, 8)
    gm = traced(function, *given)
    assert run_twice(PermuteImages(), gm)
    assert not any(gm.graph.find_nodes(op="call_function", target=target) for target in NORMS)
    for after, right in zip(gm(*given), function(*(one.double() for one in given)), strict=True):
        assert_close(after, right.float(), "result", CLOSE)
