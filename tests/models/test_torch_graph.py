"""Tests of nets that torch runs whole, against eager: saved views, mixed layouts, in-place writes to results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from ort_dynamo.testing import assert_like_eager

R = torch.randn
Program = Callable[..., Tensor | tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def runs_in_torch() -> Iterator[None]:
    yield
    assert counters["ort_train"]["islands"] == 0


def conv(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1)


def tokens(x: Tensor, c: Tensor, d: Tensor, rows: Tensor) -> Tensor:
    """A view of a copy is read after the image that it was copied from could be overwritten."""
    h = conv(x, c)
    flat = h.permute(0, 2, 3, 1).contiguous().view(h.shape[0], -1, 8)
    image = conv(torch.relu(h), d)
    return (flat @ rows).mean(1) + image.mean((2, 3))


def coordinates(x: Tensor, c: Tensor, d: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """A view of a concatenation is read after it could be overwritten."""
    h = torch.cat([conv(x, c[:6]), where], 1)
    flat = h.flatten(2)
    return flat.mean(2), conv(torch.relu(h), d).mean((2, 3))


def norm_of_sum(x: Tensor, c: Tensor, d: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the norm comes from a view, and the image from a convolution."""
    both = conv(x, c) + (R(2, 8) @ rows).view(2, 8, 1, 1)
    return F.batch_norm(both, None, None, training=True).flatten(1).square().mean(1)


def power(x: Tensor, c: Tensor, d: Tensor, rows: Tensor) -> Tensor:
    return (2 ** conv(x, c)).permute(0, 2, 3, 1).contiguous().view(-1, 8) @ rows


def one_dimension(x: Tensor, c: Tensor, d: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    y = F.conv1d(x.flatten(2), c[:, :, 0], padding=1)
    view = y.view(y.shape[0], -1)
    return view.sum(1), torch.relu(y).sum((0, 2))


PROGRAMS: tuple[Program, ...] = (tokens, coordinates, norm_of_sum, power, one_dimension)


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_views_are_as_they_were_when_they_were_made(program: Program, gradients: bool) -> None:
    last = R(2, 2, 16, 16) if program is coordinates else R(8, 8)
    args = (R(2, 3, 16, 16), R(8, 3, 3, 3) / 5, R(8, 8, 3, 3) / 9, last)
    args = tuple(one.requires_grad_(gradients) for one in args)
    assert_like_eager(program, *args, gradients=gradients)


ACTIVATIONS = (F.elu, F.celu, F.selu, F.relu6, F.hardtanh, F.hardswish, F.hardsigmoid, F.leaky_relu, F.gelu)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_decoder_trains(activation: Callable[[Tensor], Tensor]) -> None:
    def decode(z: Tensor, inside: Tensor, weight: Tensor) -> Tensor:
        return F.conv_transpose2d(activation((z @ inside).view(-1, 8, 4, 4)), weight, stride=2, padding=1)

    args = (R(4, 10), R(10, 128) / 3, R(8, 3, 4, 4) / 9)
    assert_like_eager(decode, *(one.requires_grad_() for one in args))


def last_channels(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(conv(x, weight)).permute(0, 2, 3, 1).contiguous()


def test_a_result_can_be_written_to_without_a_change_of_gradients() -> None:
    x, weight = R(2, 3, 8, 8), R(8, 3, 3, 3, requires_grad=True)

    def gradient(call: Callable[..., Tensor], write: Callable[[Tensor], object]) -> Tensor:
        result = call(x, weight)
        loss = (result * torch.linspace(0, 1, result.numel()).view(result.shape)).sum()
        write(result)
        return torch.autograd.grad(loss, weight)[0]

    compiled = torch.compile(last_channels, backend="ort_train")
    for write in (lambda y: None, lambda y: y.data.clamp_(0, 0.1), lambda y: y.detach().zero_()):
        torch.testing.assert_close(gradient(compiled, write), gradient(last_channels, write), rtol=1e-4, atol=1e-4)
    compiled(x, weight).mul_(2).sum().backward()


def test_two_copies_of_one_image_are_two() -> None:
    def twice(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        image = conv(x, weight).permute(0, 2, 3, 1)
        return image.contiguous(), image.contiguous()

    first, second = torch.compile(twice, backend="ort_train")(R(2, 3, 8, 8), R(8, 3, 3, 3))
    before = second.clone()
    first.zero_()
    torch.testing.assert_close(second, before, rtol=0, atol=0)


def test_without_onednn_the_memory_layout_stays() -> None:
    compiled = torch.compile(power, backend="ort_train")
    args = (R(2, 3, 16, 16), R(8, 3, 3, 3) / 5, R(8, 8, 3, 3), R(8, 8))
    torch._C._set_mkldnn_enabled(False)
    try:
        torch.testing.assert_close(compiled(*args), power(*args), rtol=1e-4, atol=1e-4)
    finally:
        torch._C._set_mkldnn_enabled(True)
    assert not any("channels_last" in entry for entry in counters["ort_train_chosen"])
    torch.compiler.reset()
    torch.compile(power, backend="ort_train")(*args)
    assert any("channels_last" in entry for entry in counters["ort_train_chosen"])
