"""Weights that are computed from others: weight and spectral normalization."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from ort_dynamo.testing import assert_like_eager


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm_and_its_gradients_equal_eager(dim):
    assert_like_eager(weight_norm(nn.Conv1d(3, 4, 3), dim=dim), torch.randn(2, 3, 8, requires_grad=True))


@pytest.mark.parametrize("training", [True, False])
def test_spectral_norm_and_its_gradients_equal_eager(training):
    module = spectral_norm(nn.Linear(5, 4)).train(training)
    assert_like_eager(module, torch.randn(3, 5, requires_grad=True))
