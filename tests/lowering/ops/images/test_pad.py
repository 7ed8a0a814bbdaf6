"""Padding and its gradient."""

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.testing import assert_like_eager


@pytest.mark.parametrize("pad", [(1, 2), (0, 0), (-1, 2), (1, -2, 2, 0), (0, 1, 0, 0, 3, 1), (-1, -1)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_constant_padding_equals_eager(pad, dynamic):
    x = torch.randn(3, 4, 5, requires_grad=True)
    assert_like_eager(lambda x: (F.pad(x, pad), F.pad(x, pad, value=-1.5)), x, dynamic=dynamic)


def test_constant_padding_of_other_dtypes_equals_eager():
    x = torch.arange(6).reshape(2, 3)
    assert_like_eager(
        lambda x: [
            F.pad(x.to(d), (1, 2), value=1)
            for d in (torch.int32, torch.uint8, torch.bool, torch.float16, torch.bfloat16)
        ],
        x,
        gradients=False,
    )


MODES = [
    ("reflect", (2, 1), (2, 3, 5)),
    ("reflect", (2, 1, 0, 3), (2, 3, 4, 5)),
    ("reflect", (1, 0, 2, 1, 1, 1), (1, 2, 3, 4, 5)),
    ("replicate", (2, 1), (2, 3, 5)),
    ("replicate", (2, 1, 0, 3), (2, 3, 4, 5)),
    ("replicate", (1, 0, 2, 1, 1, 1), (1, 2, 3, 4, 5)),
    ("replicate", (2, 2), (2, 3, 1)),
    ("replicate", (2, 1), (3, 5)),
    ("circular", (2, 1), (2, 3, 5)),
    ("circular", (2, 1, 0, 3), (2, 3, 4, 5)),
]


@pytest.mark.parametrize(("mode", "pad", "shape"), MODES, ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_other_padding_modes_equal_eager(mode, pad, shape, dynamic):
    # A module keeps its widths; dynamic=True makes numbers of a closure symbolic.
    kind = {"reflect": "Reflection", "replicate": "Replication", "circular": "Circular"}[mode]
    module = getattr(torch.nn, f"{kind}Pad{len(pad) // 2}d")(pad)
    assert_like_eager(
        torch.nn.Sequential(torch.nn.Identity(), module), torch.randn(*shape, requires_grad=True), dynamic=dynamic
    )


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("pad", [(-1, 2), (2, -1), (-1, -2), (-2, 0), (-1, 2, 3, -2)], ids=str)
def test_padding_that_crops_equals_eager(mode, pad):
    assert_like_eager(lambda x: F.pad(x * 1, pad, mode=mode), torch.randn(3, 6, 5, requires_grad=True))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("pad", [(-5, 2), (3, -6), (-1, 2)], ids=str)
def test_replication_that_crops_a_whole_axis_equals_eager(pad, dynamic):
    module = torch.nn.ReplicationPad1d(pad)
    assert_like_eager(torch.nn.Sequential(module), torch.randn(2, 3, 5, requires_grad=True), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_widths_that_cut_off_a_whole_axis_leave_the_padding(dynamic):
    def function(x):
        widths = [(-9, 1), (1, -9), (-5, -4, 1, 1), (-9, 10), (-4, 2, 1, -3), (-3, -2)]
        return [F.pad(x, width, value=2.0) for width in widths]

    assert_like_eager(function, torch.randn(2, 3, 9, requires_grad=True), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_reflections_of_a_width_that_is_an_argument_equal_eager(rank, dtype, dynamic):
    def pad(x, a, b):
        return F.pad(x, (a, b, 1, a, b, 2)[: 2 * rank], mode="reflect")

    x = torch.randn(2, 3, *(7, 9, 8)[:rank], dtype=dtype, requires_grad=True)
    assert_like_eager(pad, x, 3, 2, dynamic=dynamic)
