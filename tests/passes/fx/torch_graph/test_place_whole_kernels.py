"""Tests of the nodes that are marked for torch on a GPU, and of the reasons."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_twice import run_twice
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.graph.marks import CHOSEN
from ort_dynamo.passes.fx.torch_graph.place_whole_kernels import (
    ADDS,
    ATTENDS,
    BETWEEN,
    CONVOLVES_WIDE,
    GRADIENT,
    NORMALIZES,
    REPEATS,
    SORTS,
    PlaceWholeKernels,
)
from ort_dynamo.runtime.installed.providers import recorded_cpu_targets, recorded_cuda_targets
from ort_dynamo.targets.target import Target

CUDA = recorded_cuda_targets()[-1]
aten = torch.ops.aten


def marks(function: Callable[..., Any], *shapes: tuple[int, ...], **given: Any) -> Counter[str]:
    """Reason -> how many nodes of the function's graph have it; a second run must change nothing."""
    tensors = [torch.zeros(shape, dtype=given.get("dtype", torch.float32)) for shape in shapes]
    gm = make_fx(function, tracing_mode=given.get("tracing_mode", "fake"))(*tensors)
    placing = PlaceWholeKernels(given.get("target", CUDA), given.get("deterministic", False))
    modified = run_twice(placing, gm)
    found = Counter(node.meta[CHOSEN] for node in gm.graph.nodes if CHOSEN in node.meta)
    assert modified == bool(found)
    return found


def convolution(x: Tensor, w: Tensor) -> Tensor:
    return aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def gradients(grad: Tensor, x: Tensor, w: Tensor) -> Any:
    return aten.convolution_backward(grad, x, w, [8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])


IMAGES, WEIGHT, MATRIX = (2, 8, 16, 16), (8, 8, 3, 3), (512, 512)


def outweighed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` beside a product of matrices that multiplies more."""

    def both(matrix: Tensor, *arguments: Tensor) -> Any:
        return matrix @ matrix, function(*arguments)

    return both


def test_the_gradients_of_a_convolution_are_torchs() -> None:
    assert marks(outweighed(gradients), MATRIX, IMAGES, IMAGES, WEIGHT) == {GRADIENT: 1}


def test_a_convolution_stays_where_a_kernel_takes_its_dtype() -> None:
    assert not marks(outweighed(convolution), MATRIX, IMAGES, WEIGHT)
    assert not marks(outweighed(convolution), MATRIX, IMAGES, WEIGHT, dtype=torch.float16)
    assert marks(outweighed(convolution), MATRIX, IMAGES, WEIGHT, dtype=torch.bfloat16) == {CONVOLVES_WIDE: 1}


def test_a_graph_of_convolutions_is_torchs_as_a_whole() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return convolution(x, w).relu()

    assert marks(function, IMAGES, WEIGHT) == {BETWEEN: 2}


def batch_norm(x: Tensor, w: Tensor) -> Any:
    return aten._native_batch_norm_legit.no_stats(x, w, w, True, 0.1, 1e-5)


def layer_norm_gradient(grad: Tensor, x: Tensor, w: Tensor) -> Any:
    mean = x.mean(-1, keepdim=True)
    return aten.native_layer_norm_backward(grad, x, w.shape, mean, mean, w, w, [True, True, True])


def test_a_normalization_is_torchs_where_that_pays_for_the_cut() -> None:
    assert marks(batch_norm, (8, 4, 8, 8), (4,)) == {NORMALIZES: 1}, "its launches alone"
    assert not marks(layer_norm_gradient, (8, 64), (8, 64), (64,))
    assert marks(layer_norm_gradient, (4096, 1024), (4096, 1024), (1024,)) == {NORMALIZES: 1}


def test_the_size_is_the_examples() -> None:
    shapes = (4096, 1024), (4096, 1024), (1024,)
    assert marks(layer_norm_gradient, *shapes, tracing_mode="symbolic") == {NORMALIZES: 1}


def test_the_forward_of_a_layer_norm_is_one_kernel_in_a_session() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        return aten.native_layer_norm(x, [1024], w, w, 1e-5)

    assert not marks(function, (4096, 1024), (1024,))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
    out, lse, cum_q, cum_k, max_q, max_k, state, unused, _ = aten._scaled_dot_product_flash_attention(q, k, v)
    return out, aten._scaled_dot_product_flash_attention_backward(
        out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, False, state, unused
    )


def test_attention_goes_with_its_gradient() -> None:
    shape = (2, 4, 16, 64)
    assert marks(attention, shape, shape, shape, dtype=torch.bfloat16) == {ATTENDS: 2}


def test_a_loop_is_torchs() -> None:
    def experts(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return aten._grouped_mm(rows, weights, ends.int())

    half = torch.bfloat16
    assert marks(experts, (16, 8), (3, 8, 16), (3,), dtype=half) == {REPEATS: 1}
    assert marks(torch.special.zeta, (4,), (4,)) == {REPEATS: 1}
    assert marks(torch.special.hermite_polynomial_he, (4,), (4,)) == {REPEATS: 1}
    assert marks(torch.gcd, (4,), (4,), dtype=torch.int64) == {REPEATS: 1}
    assert marks(lambda x: 2**x, (4,), dtype=torch.int64) == {REPEATS: 1}
    assert not marks(lambda x: x**3, (4,), dtype=torch.int64)
    assert not marks(lambda x, y: x**y, (4,), (4,))


@pytest.mark.parametrize("sort", [
    lambda x: x.sort(1), lambda x: x.sort(dim=1, stable=True), lambda x: x.topk(3, 1), lambda x: x.kthvalue(3, 1),
    lambda x: x.median(1),
])  # fmt: skip
def test_a_sort_of_long_rows_is_torchs(sort: Callable[[Tensor], Any]) -> None:
    assert marks(sort, (2, 4097)) == {SORTS: 1}
    assert not marks(sort, (4097, 8))
    assert not marks(sort, (2, 4096))
    assert marks(sort, (2, 5000), tracing_mode="symbolic") == {SORTS: 1}


def test_a_median_of_all_sorts_one_row() -> None:
    assert marks(torch.median, (64, 65)) == {SORTS: 1}
    assert not marks(torch.median, (64, 64))
    assert not marks(lambda x: x.sort(), ())


def test_the_gradient_of_a_lookup_is_torchs() -> None:
    def table(gradient: Tensor, index: Tensor) -> Tensor:
        return aten.embedding_dense_backward(gradient, index.long(), 100, -1, False)

    def rows(x: Tensor, index: Tensor, *, adds: bool) -> Tensor:
        return aten.index_put(x, [index.long()], x[:5], adds)

    assert marks(table, (4, 8), (4,)) == {ADDS: 1}
    assert marks(lambda x, index: rows(x, index, adds=True), (9, 8), (5,)) == {ADDS: 1}
    assert not marks(lambda x, index: rows(x, index, adds=False), (9, 8), (5,))
    assert not marks(lambda x, index: rows(x, index, adds=True), (9, 8), (5,), dtype=torch.int64)


@pytest.mark.parametrize("scatter", [
    lambda x, i: x.index_add(0, i.long(), x[:5]), lambda x, i: x.scatter_add(0, i.long()[:, None], x[:5]),
    lambda x, i: x.scatter_reduce(0, i.long()[:, None], x[:5], "mean"),
])  # fmt: skip
def test_other_sums_at_indices_are_torchs_if_they_have_to_be_deterministic(scatter: Callable[..., Any]) -> None:
    shapes = (9, 8), (5,)
    assert marks(scatter, *shapes, deterministic=True) == {ADDS: 1}
    assert not marks(scatter, *shapes)
    assert not marks(scatter, *shapes, deterministic=True, dtype=torch.int64)


def test_a_sum_at_an_expanded_index_is_torchs() -> None:
    def added(x: Tensor, i: Tensor, *, width: int) -> Tensor:
        return x.scatter_add(0, i.long()[:, None].expand(5, width), x[:5])

    assert marks(lambda x, i: added(x, i, width=8), (9, 8), (5,)) == {ADDS: 1}
    assert not marks(lambda x, i: added(x, i, width=1), (9, 1), (5,))


def test_sizes_of_an_index_may_depend_on_data() -> None:
    def added(x: Tensor, mask: Tensor) -> Tensor:
        rows = mask.nonzero()
        return x.scatter_add(1, rows.t(), x[:1]).scatter_add(0, rows.expand(-1, 8), x)

    assert marks(added, (9, 8), (9,), tracing_mode="symbolic") == {ADDS: 1}


@pytest.mark.parametrize("is_power", [False, True])
def test_arguments_by_name_are_found(is_power: bool) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2, 4097, dtype=torch.int64)
    given = {"self": x, "exponent": x} if is_power else {"self": x, "k": 3}
    node = graph.call_function(aten.pow.Tensor_Tensor if is_power else aten.topk.default, (), given)
    node.meta["val"] = x.meta["val"]
    assert PlaceWholeKernels(CUDA)(torch.fx.GraphModule({}, graph)).modified
    assert node.meta[CHOSEN] == (REPEATS if is_power else SORTS)


def everything(matrix: Tensor, x: Tensor, w: Tensor, c: Tensor) -> Any:
    return matrix @ matrix, gradients(x, x, w), batch_norm(x, c), convolution(x, w)


@pytest.mark.parametrize("target", recorded_cpu_targets(), ids=lambda target: target.version)
def test_on_a_cpu_nothing_is_chosen_by_launches(target: Target) -> None:
    shapes = MATRIX, IMAGES, WEIGHT, (8,)
    assert not marks(everything, *shapes, target=target, dtype=torch.bfloat16)
    assert not marks(everything, *shapes, target=dataclasses.replace(CUDA, stands_alone=True), dtype=torch.bfloat16)
    assert marks(everything, *shapes, dtype=torch.bfloat16) == {GRADIENT: 1, NORMALIZES: 1, CONVOLVES_WIDE: 1}
