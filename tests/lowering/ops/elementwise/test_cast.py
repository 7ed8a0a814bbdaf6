"""Changes of dtype, and copies that change nothing."""

import pytest
import torch

from ort_dynamo.testing import assert_like_eager, eager_reasons

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_every_cast_equals_eager(source):
    numbers = torch.tensor([0.0, 1.0, 0.5, 1.7, 2.5, 100.3]) if source != torch.bool else torch.tensor([0, 1])
    numbers = numbers if source in (torch.uint8, torch.bool) else torch.cat([numbers, -numbers])
    assert_like_eager(
        lambda x: [x.to(d) for d in DTYPES if d != torch.uint8 or not x.is_floating_point()],
        numbers.to(source),
        gradients=False,
    )


def test_casts_of_out_of_range_values_equal_eager():
    wide = torch.tensor([300, -1, 70000, 2**40 + 3, -(2**31) - 1])
    assert_like_eager(
        lambda w: [w.to(d) for d in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.bool)],
        wide,
        gradients=False,
    )
    edges = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-40, -0.0, 70000.0, 1e39])
    assert_like_eager(
        lambda e: [e.to(d) for d in (torch.bool, torch.float16, torch.bfloat16, torch.float64)], edges, gradients=False
    )


def test_gradients_through_casts_equal_eager():
    x = torch.randn(3, 4, requires_grad=True)
    assert_like_eager(lambda x: (x.half() * 2, x.double() * 3, x.bfloat16().float()), x)
    assert_like_eager(lambda x: x.half().float() + x.to(torch.int32), x, dynamic=True)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_copies_that_change_nothing_equal_eager(dim):
    x = torch.randn([2, 3, 4][:dim], requires_grad=True)
    assert_like_eager(lambda x: (x.clone(), x.detach(), x.contiguous(), x.clone() * 2, +x), x)


def test_contiguous_of_a_permuted_tensor_equals_eager():
    x = torch.randn(2, 3, 4, requires_grad=True)
    assert_like_eager(
        lambda x: (x.permute(2, 0, 1).contiguous(), x.transpose(0, 1).clone(memory_format=torch.contiguous_format)), x
    )
    assert_like_eager(lambda x: x.permute(2, 0, 1).contiguous(), x, dynamic=True)


def test_channels_last_copies_equal_eager():
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    assert_like_eager(
        lambda x: (x.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last) * 2), x
    )


def test_in_place_copies_equal_eager():
    def function(x, y):
        z = torch.zeros(3, 4, dtype=torch.float64)
        z.copy_(x)
        z[1].copy_(y)
        z += 1
        return z

    assert_like_eager(function, torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True))


def test_bytes_read_as_another_dtype_stay_in_eager():
    assert_like_eager(lambda x: x.view(torch.int32) + 1, torch.randn(4), gradients=False, allow_eager=True)
    assert any("bytes" in reason for reason in eager_reasons())


def test_bytes_read_as_another_dtype_equal_eager():
    def function(mask, number):
        return mask.view(torch.uint8) + 1, number.view(torch.int8) + 1, (number + 1).view(torch.int8).view(torch.uint8)

    assert_like_eager(
        function, torch.rand(9) > 0.5, torch.tensor([0, 1, 127, 128, 200, 255], dtype=torch.uint8), gradients=False
    )
    assert_like_eager(lambda x: (x + 1).view(torch.int32) + 1, torch.randn(4), gradients=False, allow_eager=True)
    assert any("cannot reinterpret the bytes" in reason for reason in eager_reasons())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_number_copied_into_a_tensor_equals_eager(dynamic):
    def function(x, y):
        return torch.zeros_like(x).copy_(2) + x, torch.zeros_like(y).copy_(2.7)

    assert_like_eager(function, torch.randn(3, 4), torch.arange(5), gradients=False, dynamic=dynamic)
