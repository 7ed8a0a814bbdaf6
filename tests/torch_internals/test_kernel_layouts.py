"""Real kernels give the strides in the table of layouts, and fake tensors agree where passes rely on both."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ort_dynamo.torch_internals.kernels.kernel_layouts import (
    CONTIGUOUS,
    CONVOLUTIONS,
    IMAGE_OPERATORS,
    LAID_OUT_AS,
    ONEDNN_DTYPES,
    convolves_in_onednn,
    follows_layout,
)
from ort_dynamo.torch_internals.kernels.operators import OpOverload, all_overloads, aten, schema_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of deprecated dtypes, of roundings

SHAPES = ((2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 3, 4, 5), (3, 5, 7, 1), (2, 3, 1, 6))
ORDERS = ((0, 1, 2, 3), (0, 2, 3, 1), (0, 1, 3, 2))
CHANNELS_LAST = ORDERS[1]
FAKE = FakeTensorMode()
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def in_memory_order(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose memory goes through the dimensions in `order`."""
    values = (torch.rand([shape[axis] for axis in order]) * 0.5 + 0.25).to(dtype)
    return values.permute([*map(list(order).index, range(len(order)))])


def strides(value: Any) -> list[Any]:
    """The strides of dimensions of several elements, of each tensor of a result."""
    return [
        tuple(step for size, step in zip(one.shape, one.stride(), strict=True) if size > 1)
        if isinstance(one, torch.Tensor)
        else None
        for one in (value if isinstance(value, (tuple, list)) else [value])
    ]


def fake(operator: OpOverload, args: Any) -> list[Any]:
    with FAKE:
        return strides(operator(*tree_map_only(torch.Tensor, FAKE.from_tensor, args)))


def operands(operator: OpOverload) -> list[Any] | None:
    """The arguments without default: a type, or the number to give; None for operators that take something else."""
    found: list[Any] = []
    for argument in schema_of(operator).arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            found.append(torch.Tensor)
        elif argument.has_default_value():
            break
        elif kind in ("number", "Scalar", "float"):
            found.append(0.5)
        elif kind in ("int", "bool"):
            found.append({"int": 1, "bool": False}[kind])
        else:
            return None
    return found if torch.Tensor in found else None


def pointwise() -> Iterator[OpOverload]:
    for _, operator in all_overloads("aten"):
        if (follows_layout(operator) or operator in CONTIGUOUS or LAID_OUT_AS.get(operator) == 0) and operands(
            operator
        ):
            yield operator


POINTWISE = sorted(pointwise(), key=str)


def calls(operator: OpOverload, tensors: Sequence[torch.Tensor]) -> list[Any]:
    given = iter(tensors)
    return [next(given) if one is torch.Tensor else one for one in operands(operator) or ()]


def run(operator: OpOverload, args: list[Any]) -> Any:
    """The result; None where the operator does not take such operands."""
    try:
        return operator(*args)
    except (RuntimeError, NotImplementedError, TypeError, IndexError):
        return None


def count(operator: OpOverload) -> int:
    return sum(one is torch.Tensor for one in operands(operator) or ())


def has_memory_order(result: Any, order: Sequence[int]) -> bool:
    tensors = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor) and one.dim() == len(order)]
    return strides(tensors) == [strides(in_memory_order(one.shape, order))[0] for one in tensors]


def keeps(operator: OpOverload, args: Any, order: Sequence[int], where: Any, *, first: bool = False) -> bool:
    """Run a kernel, and assert the strides that the pass relies on; give False if nothing ran.

    If the fake results of four dimensions are in the layout, the real ones have to be, too. Results of other ranks need
    the strides of the fake ones.
    """
    result = run(operator, args)
    if result is None or isinstance(result, bool):
        return False
    promised, real = fake(operator, args), list(result) if isinstance(result, (tuple, list)) else [result]
    if first:
        promised, real = promised[:1], real[:1]
    images = [index for index, one in enumerate(real) if isinstance(one, torch.Tensor) and one.dim() == len(order)]
    wanted = [strides(in_memory_order(real[index].shape, order))[0] for index in images]
    if [promised[index] for index in images] == wanted:
        assert promised == strides(real), where
    return True


def test_the_table_has_the_operators_of_elementwise_kernels() -> None:
    assert len(POINTWISE) > 200
    assert {aten.relu.default, aten.add.Tensor, aten.elu_backward.default, aten.pow.Scalar} <= set(POINTWISE)


@pytest.mark.parametrize("operator", [one for one in POINTWISE if follows_layout(one)], ids=str)
def test_results_have_the_one_layout_of_the_operands(operator: OpOverload) -> None:
    # Every dtype in one shape, as kernels may differ; every shape in one dtype.
    forms = {*itertools.product(SHAPES[:1], ORDERS, DTYPES), *itertools.product(SHAPES, ORDERS, DTYPES[:1])}
    for shape, order, dtype in sorted(forms, key=str):
        args = calls(operator, [in_memory_order(shape, order, dtype) for _ in range(count(operator))])
        keeps(operator, args, order, (shape, order, dtype))


@pytest.mark.parametrize("operator", [one for one in POINTWISE if follows_layout(one) and count(one) > 1], ids=str)
def test_operands_that_are_broadcast_in_the_same_order_change_nothing(operator: OpOverload) -> None:
    shape = (2, 3, 4, 5)
    for order, place in itertools.product(ORDERS[:2], range(count(operator))):
        whole = [in_memory_order(shape, order) for _ in range(count(operator))]
        repeated = (
            torch.rand(3, 1, 1) * 0.5,
            torch.rand(5) * 0.5,
            torch.rand(2, 3, 1, 1) * 0.5,
            in_memory_order((1, 3, 4, 5), order),
            torch.rand(()).expand(shape),
            (torch.rand(2, 3, 1, 1) * 0.5).expand(shape),
        )
        for one in repeated:
            args = calls(operator, [*whole[:place], one, *whole[place + 1 :]])
            keeps(operator, args, order, (order, place, one.shape, one.stride()))


@pytest.mark.parametrize("operator", [one for one in LAID_OUT_AS if LAID_OUT_AS[one] == 0], ids=str)
def test_one_operand_decides_where_they_differ(operator: OpOverload) -> None:
    for shape, orders in itertools.product(SHAPES, itertools.product(ORDERS, repeat=count(operator))):
        result = operator(*calls(operator, [in_memory_order(shape, order) for order in orders]))
        assert has_memory_order(result, orders[0]), (shape, orders)


@pytest.mark.parametrize("operator", sorted(CONTIGUOUS, key=str), ids=str)
def test_some_results_are_contiguous_for_any_input_layout(operator: OpOverload) -> None:
    for shape, order in itertools.product(SHAPES, ORDERS):
        result = operator(*calls(operator, [in_memory_order(shape, order)]))
        assert has_memory_order(result, ORDERS[0]), (shape, order)


# -- operators of images -----------------------------------------------------------------------------------------------


def norm_arguments(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.rand(x.shape[1]) + 0.5 for _ in range(4))


def image_calls(operator: Any, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Iterator[list[Any]]:
    """Arguments for an operator of IMAGE_OPERATORS, all images in one layout."""

    def of(*sizes: int) -> torch.Tensor:
        return in_memory_order(sizes, order, dtype)

    n, c, h, w = shape
    x, y = of(*shape), of(*shape)
    scale, shift, mean, variance = norm_arguments(x)
    none: tuple[None, ...] = (None, None)
    statistics = torch.rand(c), torch.rand(c)
    slopes = torch.rand(1, c, 1, 1).to(dtype), torch.rand(1, 1, 1, 1).to(dtype)
    pooled = [[2, 2], [1, 1], [1, 1], [1, 1], False]
    match operator:
        case aten.convolution.default | aten.convolution_backward.default:
            yield from convolution_calls(operator, shape, order, dtype)
        case aten._native_batch_norm_legit_functional.default:
            yield [x, scale, shift, mean, variance, True, 0.1, 1e-5]
        case aten._native_batch_norm_legit.no_stats:
            yield [x, scale, shift, True, 0.1, 1e-5]
        case aten._native_batch_norm_legit_no_training.default:
            yield [x, scale, shift, mean, variance, 0.1, 1e-5]
        case aten._batch_norm_with_update_functional.default:
            yield [x, scale, shift, mean, variance, 0.1, 1e-5]
        case aten.native_batch_norm.default:
            yield [x, *none, *none, True, 0.1, 1e-5]
            yield [x, scale, shift, mean, variance, False, 0.1, 1e-5]
        case aten.native_batch_norm_backward.default:
            yield [x, y, scale, *none, *statistics, True, 1e-5, [True, True, True]]
            yield [x, y, scale, mean, variance, *none, False, 1e-5, [True, True, True]]
        case aten.batch_norm_backward.default:
            reserve = torch.empty(0, dtype=torch.uint8)
            yield [x, y, scale, *none, *statistics, True, 1e-5, [True, True, True], reserve]
        case aten.native_group_norm.default:
            for groups in (1, c):
                yield [x, scale, shift, n, c, h * w, groups, 1e-5]
                yield [x, *none, n, c, h * w, groups, 1e-5]
        case aten.native_group_norm_backward.default:
            for groups in (1, c):
                _, *moments = aten.native_group_norm.default(x, scale, shift, n, c, h * w, groups, 1e-5)
                yield [y, x, *moments, scale, n, c, h * w, groups, [True, True, True]]
        case aten._prelu_kernel.default:
            yield from ([x, slope] for slope in slopes)
        case aten._prelu_kernel_backward.default:
            yield from ([y, x, slope] for slope in slopes)
        case aten.max_pool2d_with_indices.default:
            yield [x, [2, 2], [1, 1], [1, 1]]
            yield [x, [1, 1], [1, 1]]
        case aten.max_pool2d_with_indices_backward.default:
            result, places = aten.max_pool2d_with_indices.default(x, *pooled)
            yield [of(*result.shape), x, *pooled, in_memory_order(result.shape, order, torch.int64) * 0 + places]
        case aten.avg_pool2d.default:
            yield [x, [2, 2], [1, 1], [1, 1]]
        case aten.avg_pool2d_backward.default:
            yield [of(n, c, h + 1, w + 1), x, [2, 2], [1, 1], [1, 1], False, True, None]
        case aten._adaptive_avg_pool2d.default:
            yield from ([x, [size, size]] for size in (1, 2, 3))
        case aten._adaptive_avg_pool2d_backward.default:
            yield from ([of(n, c, size, size), x] for size in (1, 2))
        case aten.upsample_nearest2d.vec | aten.upsample_bilinear2d.vec:
            flag = [] if operator is aten.upsample_nearest2d.vec else [True]
            yield [x, None, *flag, [2.0, 2.0]]
            yield [x, [3, 7], *flag, None]
        case aten.upsample_nearest2d.default:
            yield from ([x, size] for size in ([8, 9], [1, 1], [h, w]))
        case aten.upsample_bilinear2d.default:
            yield from ([x, size, flag] for size in ([8, 9], [1, 1], [h, w]) for flag in (True, False))
        case aten.upsample_nearest2d_backward.default:
            yield [of(n, c, 8, 9), [8, 9], [*shape]]
        case aten.upsample_bilinear2d_backward.default:
            yield [of(n, c, 8, 9), [8, 9], [*shape], False]
        case aten.mean.default | aten.sum.default:
            yield [x]
        case aten.mean.dim | aten.sum.dim_IntList:
            for size in range(1, 5):
                for dims in itertools.combinations(range(4), size):
                    yield from ([x, [*dims], keeps] for keeps in (True, False))
        case aten.cat.default:
            yield from ([[x, y], dim] for dim in range(4))
            yield [[x]]
            yield [[x, of(n, c + 2, h, w)], 1]
        case aten.constant_pad_nd.default:
            yield from ([x, pad, 0.0] for pad in ([1, 1, 1, 1], [-1, 0], [0, 0, 0, 0], [0, 0, 0, 0, 1, 2], [0, 1]))
        case _:
            raise AssertionError(f"no arguments for {operator}")


def convolution_calls(
    operator: Any, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype
) -> Iterator[list[Any]]:
    c = shape[1]
    kinds = [  # weight, groups, transposed
        ((4, c, 3, 3), 1, False),
        ((4, c, 1, 1), 1, False),
        ((c, 1, 3, 3), c, False),
        ((2 * c, 1, 1, 3), c, False),
        ((c, 4, 3, 3), 1, True),
        ((c, 1, 3, 3), c, True),
        ((c, 4, 2, 2), 1, True),
    ]
    for (size, groups, transposed), stride, dilation, layout in itertools.product(
        kinds, (1, 2), (1, 2), (ORDERS[0], order)
    ):
        weight, x = in_memory_order(size, layout, dtype), in_memory_order(shape, order, dtype)
        form = [[stride] * 2, [2, 2], [dilation] * 2, transposed, [0, 0], groups]
        if operator is aten.convolution.default:
            yield [x, weight, None, *form]
        else:
            result = run(aten.convolution.default, [x, weight, None, *form])
            if result is not None:
                gradient = in_memory_order(result.shape, order, dtype)
                yield [gradient, x, weight, None, *form, [True, True, False]]


def first_result(result: Any) -> Any:
    return result[0] if isinstance(result, (tuple, list)) else result


@pytest.mark.parametrize("dtype", ONEDNN_DTYPES, ids=str)
@pytest.mark.parametrize("operator", sorted(IMAGE_OPERATORS, key=str), ids=str)
def test_images_in_channels_last_give_images_in_channels_last(operator: OpOverload, dtype: torch.dtype) -> None:
    if operator in CONVOLUTIONS and not convolves_in_onednn(dtype):
        pytest.skip("the pass leaves such a convolution as it was traced on this processor")
    followed = False
    for shape, order in itertools.product(SHAPES, (ORDERS[0], CHANNELS_LAST)):
        for args in image_calls(operator, shape, order, dtype):
            where = (shape, order, [one for one in args if not isinstance(one, torch.Tensor)])
            # The gradient of a weight may follow the images.
            ran = keeps(operator, args, order, where, first=operator is aten.convolution_backward.default)
            followed |= ran and order == CHANNELS_LAST and has_memory_order(first_result(operator(*args)), order)
    assert followed
