"""Forms for integer operators that CUDA's provider lacks, and for the first of equal numbers, run on CPU kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_forms import cuda_forms
from torch import Tensor
from torch._dynamo.utils import counters

from ort_dynamo.testing import eager_reasons

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NAN, INF = float("nan"), float("inf")


def integers(dtype: torch.dtype) -> Tensor:
    """Rows of integers of all sizes: the extremes, equal ones, and ones that differ in the last bits only."""
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    found = torch.randint(least, most, (7, 37), dtype=dtype, generator=torch.Generator().manual_seed(0))
    found[0, :3] = torch.tensor([least, most, least], dtype=dtype)
    found[1] = found[1, 0]
    found[2] = most - torch.arange(37, dtype=dtype) % 3
    found[3] = least + torch.arange(37, dtype=dtype) % 5
    found[4] = torch.arange(37, dtype=dtype) % 4
    return found


def floats() -> Tensor:
    """Rows of float32 with equal numbers, NaN, and infinities."""
    found = torch.randn(7, 37, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    found[0, [3, 9]] = NAN
    found[1], found[2] = -INF, INF
    found[3, [5, 6]], found[4, [7, 8]] = INF, -INF
    found[5] = 0.5
    return found


def assert_as_eager(
    function: Callable[..., Any], *inputs: Tensor, fused: bool = True, dynamic: bool = False
) -> dict[str, Any]:
    """Compare bit for bit; nothing may be in eager. Gives the fused kernels."""
    torch._dynamo.reset()
    counters.clear()
    with cuda_forms(fused=fused) as found:
        options = {"placement": "onnxruntime"}
        result = torch.compile(function, backend="ort_train", options=options, dynamic=dynamic)(*inputs)
    assert not eager_reasons()
    assert found.operators
    torch.testing.assert_close(result, function(*inputs), rtol=0, atol=0, equal_nan=True)
    return found.kernels


OF_ROWS: dict[str, Callable[[Tensor], Any]] = {
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max along": lambda x: tuple(x.max(1)),
    "min along": lambda x: tuple(x.min(0, keepdim=True)),
    "argmax": lambda x: x.argmax(),
    "argmax along": lambda x: x.argmax(1),
    "argmin along": lambda x: x.argmin(0, keepdim=True),
}
OF_INTEGERS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "sum along": lambda x: x.sum(1, keepdim=True),
    "not": torch.bitwise_not,
    "pad": lambda x: F.pad(x, (2, 3), value=5),
    "pad and cut": lambda x: F.pad(x, (1, -2, -1, 3), value=7),
    "pad of nothing": lambda x: F.pad(x, (0, 0, 0, 0)) + 1,
    "cut": lambda x: F.pad(x, (-1, -2)),
    "reflect": lambda x: F.pad(x[None], (2, 3, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x[None], (-2, 3, 1, -1), mode="replicate"),
    "mode": lambda x: x.mode(1).values,
}


@pytest.mark.parametrize("fused", [False, True], ids=["nodes", "fused"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", [*OF_ROWS, *OF_INTEGERS])
def test_a_form_of_integers_is_exact(name: str, dtype: torch.dtype, fused: bool) -> None:
    assert_as_eager({**OF_ROWS, **OF_INTEGERS}[name], integers(dtype), fused=fused)


@pytest.mark.parametrize("name", [*OF_ROWS, *OF_INTEGERS])
def test_a_form_of_symbolic_sizes_is_exact(name: str) -> None:
    assert_as_eager({**OF_ROWS, **OF_INTEGERS}[name], integers(torch.int64), dynamic=True)


@pytest.mark.parametrize("fused", [False, True], ids=["nodes", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OF_ROWS)
def test_the_first_of_equal_numbers_wins_and_so_does_nan(name: str, dtype: torch.dtype, fused: bool) -> None:
    assert_as_eager(OF_ROWS[name], floats().to(dtype), fused=fused)


BITS = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", BITS)
def test_bits_are_those_of_a_kernel(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    x = integers(dtype)
    assert assert_as_eager(BITS[name], x, x[1:2].flip(1), dynamic=dynamic)
    assert assert_as_eager(lambda x: BITS[name](x, 3), x, dynamic=dynamic)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("shift", [torch.bitwise_left_shift, torch.bitwise_right_shift], ids=["left", "right"])
def test_shifts_of_any_width(shift: Callable[..., Tensor], dtype: torch.dtype) -> None:
    widths = torch.arange(-3, 70)[:, None] if dtype.is_signed else torch.arange(70)[:, None]
    assert_as_eager(shift, integers(dtype)[:, None, :3], widths.to(dtype))


def test_labels_are_padded_within_one_session() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        moved = F.pad(labels, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(logits.flatten(0, 1), moved.flatten())

    logits = torch.randn(2, 5, 11, requires_grad=True)
    labels = torch.randint(0, 11, (2, 5))
    counters.clear()
    with cuda_forms(fused=True):
        found = torch.compile(loss, backend="ort_train")(logits, labels)
        (grad,) = torch.autograd.grad(found, logits)
    right = loss(logits, labels)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(grad, torch.autograd.grad(right, logits)[0])
    assert not eager_reasons()


def test_integer_operator_without_a_kernel_runs_in_eager() -> None:
    counters.clear()
    with cuda_forms(fused=True):
        nothing = torch.zeros(0, 3, dtype=torch.int64)
        assert torch.compile(torch.bitwise_and, backend="ort_train")(nothing, nothing).shape == (0, 3)
    (reason,) = eager_reasons()
    assert "a fused BitwiseAnd takes no tensor without elements" in reason
    counters.clear()
    with cuda_forms(fused=False):
        one = torch.ones(2, dtype=torch.int64)
        assert torch.compile(torch.bitwise_and, backend="ort_train")(one, one).tolist() == [1, 1]
    (reason,) = eager_reasons()
    assert "has no BitwiseAnd kernel" in reason
