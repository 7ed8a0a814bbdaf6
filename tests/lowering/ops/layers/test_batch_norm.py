"""Batch and instance normalization: values, running statistics and gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from ort_dynamo.lowering.ops.layers import batch_norm
from ort_dynamo.lowering.recipes.sums import channel_sum
from ort_dynamo.testing import TOLERANCES, Tolerance, assert_close, assert_like_eager

aten = torch.ops.aten


@pytest.fixture(params=["training by the kernel", "training by nodes", "inference"])
def training(request, monkeypatch):
    """Choose training (by BatchNormalization's training mode, or by separate nodes) or inference."""
    if request.param == "training by nodes":
        monkeypatch.setattr(batch_norm, "_has_training_kernel", lambda *_: False)
    return request.param != "inference"


def leaf(*shape, dtype=torch.float32, scale=1.0, shift=0.0):
    return (torch.randn(shape) * scale + shift).to(dtype).requires_grad_()


def randomised(module):
    """Parameters and buffers other than the ones a module starts with."""
    for value in (*module.parameters(), *module.buffers()):
        if value.is_floating_point():
            nn.init.uniform_(value.data, 0.3, 2.0)
    return module


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.BatchNorm2d(3), (4, 3, 5, 6)),
        (nn.BatchNorm2d(3, momentum=0.7, eps=0.1), (2, 3, 4, 4)),
        (nn.BatchNorm2d(3, affine=False), (4, 3, 5, 6)),
        (nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 5, 6)),
        (nn.BatchNorm2d(3, affine=False, track_running_stats=False), (4, 3, 5, 6)),
        (nn.BatchNorm1d(5), (8, 5)),
        (nn.BatchNorm1d(5, affine=False), (8, 5)),
        (nn.BatchNorm1d(5), (3, 5, 7)),
        (nn.BatchNorm3d(2), (2, 2, 3, 2, 4)),
        (nn.BatchNorm2d(1), (6, 1, 3, 3)),
        (nn.InstanceNorm2d(3), (2, 3, 4, 5)),
        (nn.InstanceNorm2d(3, affine=True), (2, 3, 4, 5)),
    ],
    ids=repr,
)
def test_normalization_and_its_gradients_equal_eager(module, shape, training):
    assert_like_eager(randomised(module).train(training), leaf(*shape, scale=2, shift=1))


@pytest.mark.parametrize(
    "plane", [(32, 32), (32, 521), (1, 1021), (256, 128)], ids=str
)  # dots of 1024, 8336, 1021, 2**14
def test_gradients_of_planes_that_are_summed_by_dot_products_equal_eager(plane, training):
    module = randomised(nn.BatchNorm2d(3)).train(training)
    assert_like_eager(module, leaf(2, 3, *plane, scale=2, shift=1))


def test_infinity_in_a_long_plane_equals_eager():
    x = leaf(2, 3, 32, 32)
    x.data[0, 1, 5, 7] = torch.inf
    assert_like_eager(randomised(nn.BatchNorm2d(3)), x)


@pytest.mark.parametrize(
    ("plane", "length"),
    [(511, None), (512, 512), (521, 521), (1 << 14, 1 << 14), (3 << 13, 3 << 12), (16411, None), (480 * 640, 15360)],
)
def test_the_length_of_dot_products_divides_the_plane(plane, length):
    assert channel_sum._dot_length(plane) == length


def test_instance_norm_with_running_statistics_equals_eager(training):
    module = randomised(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)).train(training)
    assert_like_eager(module, leaf(2, 3, 4, 5))


def test_running_statistics_follow_eager_over_many_steps():
    compiled, eager = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    step = torch.compile(compiled, backend="ort_train")
    for index in range(6):
        x = torch.randn(4, 3, 5, 5) * (index + 1) + index
        torch.testing.assert_close(step(x), eager(x), rtol=1e-5, atol=1e-5)
    for (name, mine), theirs in zip(compiled.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)


def test_infinity_in_the_first_index_of_a_channel_equals_eager(training):
    x = torch.randn(2, 3, 4, 4)
    x[0, 1, 0, 0], x[0, 2, 0, 0] = float("inf"), float("nan")
    assert_like_eager(nn.BatchNorm2d(3).train(training), x, gradients=False)


def test_a_batch_with_infinity_leaves_no_trace_in_the_next_one():
    # The training kernel writes into its running statistics; values of a bad batch must not survive there.
    step = torch.compile(nn.BatchNorm2d(3, track_running_stats=False), backend="ort_train")
    x = torch.randn(4, 3, 5, 5)
    expected = functional.batch_norm(x, None, None, training=True)
    for bad in (float("inf"), float("nan")):
        poisoned = x.clone()
        poisoned[0, :, 0, 0] = bad
        step(poisoned)
        torch.testing.assert_close(step(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("needed", ["x", "w", "b", "xw", "wb"])
def test_only_the_gradients_asked_for_are_computed(needed, training):
    x, w, b = leaf(3, 4, 5).detach(), torch.randn(4), torch.randn(4)
    for name, tensor in (("x", x), ("w", w), ("b", b)):
        tensor.requires_grad_(name in needed)
    mean, var = torch.randn(4), torch.rand(4) + 0.5
    assert_like_eager(
        lambda x, w, b, mean, var: functional.batch_norm(x, mean, var, w, b, training), x, w, b, mean, var
    )


@pytest.mark.parametrize("shape", [(3, 4, 5, 6), (5, 4)])
def test_batch_norm_with_symbolic_sizes_equals_eager(shape, training):
    module = randomised((nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(4)).train(training)
    assert_like_eager(module, leaf(*shape), dynamic=True)


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_with_symbolic_sizes_equals_eager(affine):
    assert_like_eager(nn.InstanceNorm2d(4, affine=affine), leaf(3, 4, 5, 6), dynamic=True)


def test_batch_norm_of_a_large_mean_is_as_accurate_as_eager(training):
    assert_like_eager(nn.BatchNorm2d(3).train(training), leaf(4, 3, 8, 8, shift=300.0), tolerance=Tolerance(1e-4, 1e-5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_width_batch_norm_equals_eager(dtype, training):
    assert_like_eager(nn.BatchNorm2d(3).to(dtype).train(training), leaf(4, 3, 5, 6, dtype=dtype))


def test_batch_norm_of_bfloat16_with_float32_parameters_equals_eager():
    # AOTAutograd takes the saved statistics for bfloat16 here; eager keeps them in float32.
    module = randomised(nn.BatchNorm2d(3))
    assert_like_eager(module, leaf(4, 3, 5, 6, dtype=torch.bfloat16), tolerance=TOLERANCES[torch.bfloat16])


def test_float64_batch_norm_equals_eager(training):
    assert_like_eager(nn.BatchNorm2d(3).double().train(training), leaf(4, 3, 5, 6, dtype=torch.float64))


def test_convolution_with_batch_norm_equals_eager():
    net = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    assert_like_eager(net, leaf(2, 2, 6, 6))


# -- overloads that AOTAutograd does not send today --------------------------------------------------------------


def test_native_batch_norm_in_inference_equals_eager():
    mean, var = torch.randn(3), torch.rand(3) + 0.5
    assert_like_eager(
        lambda x, w, b, m, v: torch.native_batch_norm(x, w, b, m, v, False, 0.1, 1e-3)[0],
        leaf(2, 3, 4, 4), leaf(3), leaf(3), mean, var,
    )  # fmt: skip


def test_batch_norm_with_update_functional_equals_eager():
    mean, var = torch.randn(3), torch.rand(3) + 0.5
    assert_like_eager(
        lambda x, w, b, m, v: tuple(
            aten._batch_norm_with_update_functional(x, w, b, m, v, 0.1, 1e-3)[index] for index in (0, 1, 2, 4, 5)
        ),
        torch.randn(2, 3, 4, 4), torch.randn(3), torch.randn(3), mean, var,
        gradients=False,
    )  # fmt: skip


def test_batch_norm_backward_equals_eager():
    x, grad, w = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.randn(3)
    saved = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + 1e-3).rsqrt()
    running = torch.randn(3), torch.rand(3) + 0.5
    for update in (True, False):
        assert_like_eager(
            lambda *t: aten.batch_norm_backward(*t[:-1], update, 1e-3, [True, True, True], t[-1]),  # noqa: B023
            grad, x, w, *running, *saved, torch.empty(0, dtype=torch.uint8),
            gradients=False,
        )  # fmt: skip


@pytest.mark.parametrize("training", [True, False])
def test_float64_epsilon_keeps_its_digits(training):
    x = (torch.randn(4, 3, 5, dtype=torch.float64) * 1e-3).requires_grad_()
    assert_like_eager(nn.BatchNorm1d(3).double().train(training), x)


def test_gradients_of_a_transposed_batch_are_those_of_the_formula():
    """Eager's on the CPU are not: it takes the memory of such an input for that of another order."""

    def function(model, x, weight, transposed):
        return (model(transposed(x)).permute(0, 3, 1, 2).contiguous() * weight).sum()

    x, weight = torch.randn(4, 1, 8, 6), torch.randn(4, 1, 6, 8)
    model = torch.nn.BatchNorm2d(6)
    function(model, x, weight, lambda x: x.transpose(1, 3).contiguous()).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(function, backend="ort_train")(model, x, weight, lambda x: x.transpose(1, 3)).backward()
    for p, wanted in zip(model.parameters(), expected, strict=True):
        assert_close(p.grad, wanted, "the gradient")
