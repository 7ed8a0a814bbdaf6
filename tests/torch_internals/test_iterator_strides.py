"""The rule of elementwise results' strides, against torch's kernels."""

from __future__ import annotations

import random

import pytest
import torch

from ort_dynamo.torch_internals.kernels.iterator_strides import contiguous_strides, elementwise_strides, is_dense


def _operand(choose: random.Random, sizes: tuple[int, ...]) -> torch.Tensor:
    """A tensor that is broadcast to `sizes`: permuted, stepped, expanded, or with fewer dimensions."""
    own = [1 if choose.random() < 0.2 else size for size in sizes[choose.choice((0, 0, 0, 1)) :]]
    order = choose.sample(range(len(own)), len(own))
    inverse = sorted(range(len(own)), key=order.__getitem__)
    tensor = torch.rand([own[axis] for axis in order] + [1]).squeeze(-1).permute(inverse)
    match choose.randrange(6):
        case 0 if own:
            return tensor.repeat_interleave(2, -1)[..., ::2]
        case 1 if own:
            return tensor[:1].expand_as(tensor)
        case 2 if len(own) == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        case 3:
            return tensor.contiguous()
    return tensor


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tensor.stride()


@pytest.mark.parametrize("seed", range(400))
def test_kernels_give_the_strides_of_the_rule(seed: int) -> None:
    choose = random.Random(seed)
    sizes = tuple(choose.choice((1, 1, 2, 3, 5)) for _ in range(choose.randint(1, 5)))
    operands = [_operand(choose, sizes) for _ in range(choose.randint(1, 3))]
    if choose.random() < 0.5:  # a second operand with the first one's layout, or all whole
        operands = [operands[0].expand(sizes)] * len(operands)
    layouts = list(map(_layout, operands))
    result = {1: torch.sin, 2: torch.atan2, 3: torch.addcmul}[len(operands)](*operands)
    assert elementwise_strides(tuple(result.shape), layouts) == result.stride(), layouts
    numbers = operands[0] + 1
    assert elementwise_strides(tuple(numbers.shape), [layouts[0], ((), ())]) == numbers.stride(), layouts[0]


def test_dense_memory_is_told_from_gaps_and_overlaps() -> None:
    assert is_dense(((2, 3), (1, 2)))
    assert is_dense(((2, 1, 3), (3, 77, 1)))
    assert not is_dense(((2, 3), (6, 2)))
    assert not is_dense(((2, 3), (0, 1)))
    assert contiguous_strides((2, 1, 3)) == (3, 3, 1)
    assert contiguous_strides((2, 1, 3), (0, 1, 2)) == (1, 2, 2)
