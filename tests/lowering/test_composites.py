"""Operators that are traced as their formulas."""

import pytest
import torch
from torch import nn

from ort_dynamo.testing import assert_like_eager


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_normalization_and_its_gradient_equal_eager(dim):
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=dim)
    assert_like_eager(layer, torch.randn(2, 4, 8, requires_grad=True))
