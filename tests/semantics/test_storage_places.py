"""Views and copies that differ in what autograd, as_strided and complex operators see of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def detached_slice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y, y.detach()[0:1]


def detached_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y, y.data.view(-1)[:2]


def views_with_and_without_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y[0:2], y.detach()[0:2][0:1]


@pytest.mark.parametrize("function", [detached_slice, detached_view, views_with_and_without_gradients])
def test_a_view_of_a_detached_result_requires_no_gradient(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    given = torch.rand(3), torch.rand(3)
    gradients = []
    for run in (function, torch.compile(function, backend="ort_train")):
        x = given[0].clone().requires_grad_()
        whole, part = run(x)
        assert whole.requires_grad
        assert not part.requires_grad
        assert part.numpy().shape == part.shape
        part.mul_(1)
        (whole.sum() + part.sum()).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def of_a_slice(x: Tensor) -> Tensor:
    return torch.as_strided(x.sin()[1:].clone(), (2,), (1,), 0) * 2


def of_a_chunk(x: Tensor) -> Tensor:
    return torch.as_strided(x.sin().chunk(2)[1].clone(), (2,), (1,), 1) * 2


convolution = nn.Conv2d(2, 4, 3).requires_grad_(False)


def of_images(x: Tensor) -> Tensor:
    z = convolution(x).relu().permute(0, 2, 3, 1)[1:].contiguous()
    return torch.as_strided(z, (2, 3), (3, 1), 0) * 1.0


def after_a_write_to_a_slice(x: Tensor) -> Tensor:
    x[1:3].mul_(2)
    return torch.as_strided(x, (3,), (1,), 3) * 2


def before_the_input(x: Tensor) -> Tensor:
    x[1:3].mul_(2)
    return torch.as_strided(x, (3,), (1,), 1) * 2


def after_a_write_by_place(x: Tensor) -> Tensor:
    torch.as_strided(x, (2,), (1,), 4).mul_(2)
    return torch.as_strided(x, (3,), (1,), 3) * 2


def read_by_torch(x: Tensor) -> Tensor:
    torch.as_strided(x, (2,), (1,), 4).mul_(2)
    return torch.fft.fft(torch.as_strided(x, (3,), (1,), 3)).real


PLACES: dict[str, tuple[Callable[..., Tensor], Callable[[], Tensor]]] = {
    "of_a_slice": (of_a_slice, lambda: torch.rand(6)),
    "of_a_chunk": (of_a_chunk, lambda: torch.rand(6)),
    "of_images": (of_images, lambda: torch.randn(3, 2, 6, 6)),
    "after_a_write_to_a_slice": (after_a_write_to_a_slice, lambda: torch.arange(20.0)[3:11]),
    "before_the_input": (before_the_input, lambda: torch.arange(20.0)[3:11]),
    "after_a_write_by_place": (after_a_write_by_place, lambda: torch.arange(20.0)[3:11]),
    "read_by_torch": (read_by_torch, lambda: torch.arange(20.0)[3:11]),
}


@pytest.mark.filterwarnings("ignore:ort_train")
@pytest.mark.parametrize("name", PLACES)
def test_as_strided_counts_from_the_memory_of_eager(name: str) -> None:
    function, make = PLACES[name]
    torch.manual_seed(0)
    x = make()
    storage = x.untyped_storage().clone()
    expected = function(x)
    written = x.clone()
    again = torch.empty(0).set_(storage, x.storage_offset(), x.shape, x.stride())
    found = torch.compile(function, backend="ort_train")(again)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, written)


def test_a_copy_without_the_bit_of_conjugation_stays() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.resolve_conj(x.exp().conj())).sum()

    x = torch.randn(3, dtype=torch.complex64)
    torch.testing.assert_close(torch.compile(function, backend="ort_train")(x), function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x[x > 0], 0.5).sum(),
        lambda x: torch.rand_like(x[x > 0]).sum(),
        lambda x: torch.rand(x[x > 0].shape[0] * 2).sum(),
    ],
    ids=["dropout", "rand_like", "rand"],
)
def test_random_numbers_may_have_a_size_that_depends_on_data(function: Callable[[Tensor], Any]) -> None:
    compiled, x = torch.compile(function, backend="ort_train"), torch.randn(16)
    torch.manual_seed(1)
    expected = function(x)
    torch.manual_seed(1)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = compiled(x)
    torch.testing.assert_close(found, expected)
