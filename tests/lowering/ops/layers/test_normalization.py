"""Layer, group and root-mean-square normalization and their gradients."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

from ort_dynamo.lowering.ops.layers import normalization
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.testing import TOLERANCES, Tolerance, assert_like_eager

# The LayerNormalization of the training build is not accurate enough to be used.
FORMS = ["nodes"] if installed_runtime().has_gradient_kernels else ["kernel", "nodes"]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """LayerNormalization, where it is accurate, and the form that every runtime has."""
    if request.param == "nodes":
        monkeypatch.setattr(normalization, "_fused_dtype", lambda *_: None)


def leaf(*shape, dtype=torch.float32, scale=1.0, shift=0.0):
    return (torch.randn(shape) * scale + shift).to(dtype).requires_grad_()


def asked(needed, *tensors):
    """The tensors x, w and b; only those named in `needed` require a gradient."""
    return [tensor.detach().requires_grad_(name in needed) for name, tensor in zip("xwb", tensors, strict=True)]


@pytest.mark.parametrize(
    ("shape", "normalized"),
    [((4, 7), 1), ((2, 3, 5), 1), ((2, 3, 4, 5), 2), ((3, 4), 2), ((6,), 1), ((1, 8), 1), ((40, 16), 1)],
)
def test_layer_norm_and_its_gradients_equal_eager(shape, normalized, form):
    tail = shape[len(shape) - normalized :]
    assert_like_eager(
        lambda x, w, b: functional.layer_norm(x, tail, w, b), leaf(*shape, scale=3), leaf(*tail), leaf(*tail)
    )


@pytest.mark.parametrize("given", ["", "w", "b"])
def test_layer_norm_without_all_parameters_equals_eager(given, form):
    x, w, b = leaf(3, 4, 5), leaf(5), leaf(5)
    assert_like_eager(
        lambda x, w, b: torch.native_layer_norm(x, (5,), w if "w" in given else None, b if "b" in given else None, 0.1),
        x,
        w if "w" in given else w.detach(),
        b if "b" in given else b.detach(),
    )


@pytest.mark.parametrize("needed", ["x", "w", "b", "xw", "wb"])
def test_only_the_layer_norm_gradients_asked_for_are_computed(needed, form):
    x, w, b = asked(needed, leaf(3, 4, 5), leaf(5), leaf(5))
    assert_like_eager(lambda x, w, b: functional.layer_norm(x, (5,), w, b), x, w, b)


def test_layer_norm_with_symbolic_sizes_equals_eager(form):
    assert_like_eager(nn.LayerNorm(5), leaf(3, 6, 5), dynamic=True)


def test_layer_norm_over_symbolic_sizes_equals_eager(form):
    assert_like_eager(lambda x: functional.layer_norm(x, x.shape[1:]), leaf(3, 6, 5), dynamic=True)


@pytest.mark.parametrize("mean", [30.0, 1000.0])
def test_layer_norm_of_a_large_mean_is_as_accurate_as_eager(mean):
    x = leaf(6, 64, shift=mean)
    # eager itself is off by as much from a float64 computation
    tolerance = Tolerance(1e-4, 1e-6)
    assert_like_eager(lambda x: functional.layer_norm(x, (64,)), x, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_width_layer_norm_equals_eager(dtype, form):
    module = nn.LayerNorm(16).to(dtype)
    nn.init.normal_(module.weight)
    assert_like_eager(module, leaf(4, 16, dtype=dtype))


def test_layer_norm_of_bfloat16_with_float32_parameters_equals_eager(form):
    # AOTAutograd takes mean and deviation for bfloat16 here; eager keeps them in float32.
    assert_like_eager(
        lambda x, w, b: functional.layer_norm(x, (16,), w, b),
        leaf(4, 16, dtype=torch.bfloat16),
        leaf(16),
        leaf(16),
        tolerance=TOLERANCES[torch.bfloat16],
    )


def test_float64_layer_norm_equals_eager():
    assert_like_eager(nn.LayerNorm(6).double(), leaf(4, 6, dtype=torch.float64))


def test_layer_norm_keeps_nan_and_infinity_in_their_rows(form):
    x = torch.randn(5, 8)
    x[1, 3], x[2, 2], x[3] = math.nan, math.inf, 7.0
    assert_like_eager(lambda x: functional.layer_norm(x, (8,)), x, gradients=False)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_layer_norm_of_no_elements_equals_eager(shape, form):
    assert_like_eager(nn.LayerNorm(shape[1]), leaf(*shape))
    x = torch.randn(shape)
    assert_like_eager(lambda x: torch.native_layer_norm(x, shape[1:], None, None, 1e-5), x, gradients=False)


def test_layer_norm_in_inference_equals_eager(form):
    with torch.no_grad():
        assert_like_eager(nn.LayerNorm(4), torch.randn(3, 4), gradients=False)


# -- group normalization -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("groups", "shape"), [(2, (3, 4, 5, 6)), (1, (2, 6, 7)), (6, (2, 6, 3)), (3, (4, 12)), (2, (1, 4, 2, 3, 2))]
)
def test_group_norm_and_its_gradients_equal_eager(groups, shape, affine):
    module = nn.GroupNorm(groups, shape[1], affine=affine)
    if affine:
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
    assert_like_eager(module, leaf(*shape, scale=2, shift=1))


@pytest.mark.parametrize("needed", ["x", "w", "b", "xw", "wb"])
def test_only_the_group_norm_gradients_asked_for_are_computed(needed):
    x, w, b = asked(needed, leaf(3, 4, 5), leaf(4), leaf(4))
    assert_like_eager(lambda x, w, b: functional.group_norm(x, 2, w, b), x, w, b)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_with_symbolic_sizes_equals_eager(affine):
    assert_like_eager(nn.GroupNorm(2, 4, affine=affine), leaf(3, 4, 5, 6), dynamic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_width_group_norm_equals_eager(dtype):
    assert_like_eager(nn.GroupNorm(2, 4).to(dtype), leaf(2, 4, 5, 5, dtype=dtype))


def test_float64_group_norm_equals_eager():
    assert_like_eager(nn.GroupNorm(2, 4).double(), leaf(2, 4, 5, dtype=torch.float64))


def test_group_norm_of_a_large_mean_is_as_accurate_as_eager():
    x = leaf(2, 4, 64, shift=100.0)
    assert_like_eager(lambda x: functional.group_norm(x, 2), x, tolerance=Tolerance(3e-4, 1e-6))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (2, 0, 3)])
def test_group_norm_of_no_elements_equals_eager(shape):
    x, w, b = leaf(*shape), leaf(shape[1]), leaf(shape[1])
    traceable = shape[0] == 0  # torch's own shape function of the gradient divides by the number of places

    def norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> object:
        return torch.native_group_norm(x, w, b, *shape, 2, 1e-5)

    with torch.set_grad_enabled(traceable):
        try:
            norm(x, w, b)
        except RuntimeError as error:  # torch 2.15 takes no rows of no places and no channels
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                torch.compile(norm, backend="ort_train")(x, w, b)
        else:
            assert_like_eager(norm, x, w, b, gradients=traceable)


# -- root-mean-square normalization ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 7), (2, 3, 5)])
def test_rms_norm_and_its_gradients_equal_eager(shape):
    assert_like_eager(lambda x, w: functional.rms_norm(x, shape[-1:], w, 1e-3), leaf(*shape), leaf(shape[-1]))


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_rms_norm_and_its_gradients_equal_eager(weight, eps, dtype):
    w = leaf(5, dtype=dtype) if weight else None
    assert_like_eager(lambda x, w: torch.ops.aten._fused_rms_norm(x, [5], w, eps)[0], leaf(2, 3, 5, dtype=dtype), w)


def test_fused_rms_norm_over_two_dimensions_equals_eager():
    assert_like_eager(lambda x, w: torch.ops.aten._fused_rms_norm(x, [3, 5], w, None), leaf(4, 3, 5), leaf(3, 5))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_fused_rms_norm_of_no_elements_equals_eager(shape):
    w = leaf(shape[1])
    assert_like_eager(lambda x, w: torch.ops.aten._fused_rms_norm(x, shape[1:], w, None), leaf(*shape), w)
