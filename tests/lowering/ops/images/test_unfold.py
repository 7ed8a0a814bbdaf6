"""Sliding windows as columns, and back."""

import pytest
import torch
from torch.nn import functional

from ort_dynamo.testing import assert_like_eager

WINDOWS = {
    "overlapping": ((2, 3, 7, 8), {"kernel_size": 3}),
    "padding": ((2, 3, 7, 8), {"kernel_size": (3, 2), "padding": (2, 1)}),
    "stride with a rest": ((2, 3, 8, 9), {"kernel_size": 3, "stride": 2}),
    "stride beyond the kernel": ((2, 3, 9, 11), {"kernel_size": 2, "stride": (3, 4), "padding": 1}),
    "stride below a dilation": ((2, 3, 9, 11), {"kernel_size": 3, "stride": 2, "dilation": 3, "padding": 2}),
    "tiles": ((2, 3, 8, 6), {"kernel_size": (4, 2), "stride": (4, 2)}),
    "tiles with a rest": ((2, 3, 9, 7), {"kernel_size": (4, 2), "stride": (4, 2)}),
    "tiles with padding": ((2, 3, 7, 6), {"kernel_size": 3, "stride": 3, "padding": 1}),
    "one place": ((2, 3, 5, 4), {"kernel_size": 1, "stride": 2}),
    "without a batch": ((3, 5, 4), {"kernel_size": 2}),
    "empty batch": ((0, 3, 5, 4), {"kernel_size": 2}),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_unfold_and_its_gradient_equal_eager(case):
    shape, options = WINDOWS[case]
    assert_like_eager(lambda x: functional.unfold(x, **options), torch.randn(shape, requires_grad=True))


@pytest.mark.parametrize("case", WINDOWS)
def test_fold_and_its_gradient_equal_eager(case):
    shape, options = WINDOWS[case]
    columns = functional.unfold(torch.zeros(shape), **options)
    x = torch.randn_like(columns).requires_grad_()
    assert_like_eager(lambda x: functional.fold(x, shape[-2:], **options), x)


@pytest.mark.parametrize(
    "case", ["overlapping", "padding", "stride with a rest", "stride below a dilation", "tiles with a rest"]
)
def test_symbolic_sizes_equal_eager(case):
    (_, *shape), options = WINDOWS[case]

    def there_and_back(x):
        columns = functional.unfold(x, **options)
        return columns, functional.fold(columns * columns, x.shape[-2:], **options)

    assert_like_eager(there_and_back, torch.randn(5, *shape, requires_grad=True), dynamic=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_equal_eager(dtype):
    x = torch.randn(2, 3, 7, 8, dtype=dtype, requires_grad=True)

    def there_and_back(x):
        return functional.fold(functional.unfold(x, 3, stride=2, padding=1), (7, 8), 3, stride=2, padding=1)

    assert_like_eager(there_and_back, x)
