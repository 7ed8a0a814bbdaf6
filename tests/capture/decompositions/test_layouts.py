"""Results have the memory layout that eager's kernels give them, not only the one that torch's fake tensors promise."""

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.testing import assert_like_eager


def batch_norm(x, training):
    return F.batch_norm(x, torch.zeros(6), torch.ones(6), torch.full((6,), 0.5), None, training)


def results(x, other):
    return (
        *(torch.roll(x, 1, 2), torch.roll(x, (1, -2), (1, -1)), torch.roll(x, 3)),
        *(F.channel_shuffle(x, 3), F.channel_shuffle(x, 6)),
        *(torch.copysign(x, other), torch.copysign(x, other[0, 0, 0]), torch.copysign(other, x)),
        *(torch.xlogy(x, other.sigmoid()), torch.special.xlog1py(other, x.sigmoid()), 2**x, F.logsigmoid(other) ** 2),
        *(batch_norm(x, True), batch_norm(x, False), F.instance_norm(x), F.logsigmoid(x)),
    )


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "batch and channels swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "some channels of channels last": lambda x: torch.cat([x, x], 1).to(memory_format=torch.channels_last)[:, :6],
    "every other column": lambda x: x.repeat_interleave(2, 3)[..., ::2],
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_eagers_memory_layout(layout, dynamic):
    x, other = (LAYOUTS[key](torch.randn(2, 6, 3, 5)) for key in (layout, "contiguous"))
    # A tensor that is computed from a result takes over its layout.
    assert_like_eager(lambda x, other: [y * 2 for y in results(x, other)], x.requires_grad_(), other, dynamic=dynamic)


ACTIVATIONS = (F.elu, F.selu, F.celu, F.relu6, F.hardtanh, F.hardswish, F.hardsigmoid, F.leaky_relu, torch.logit)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_activations_have_the_memory_layout_of_the_results_gradients(activation):
    def function(x, weight):
        image = activation(x.sigmoid() * 0.9 + 0.05)
        return F.conv_transpose2d(image.to(memory_format=torch.channels_last), weight)

    # The gradient is in channels last; the view in the backward raises if the graph takes it for contiguous.
    weight = torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last)
    assert_like_eager(
        lambda x, weight: function(x.view(2, 6, 3, 5), weight),
        *(torch.randn(2, 90).requires_grad_(), weight.requires_grad_()),
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("shape", "order"), [((3, 3, 1, 6), (0, 3, 2, 1)), ((3, 1, 3, 6), (0, 3, 2, 1)),
                                              ((3, 3, 6, 1), (0, 2, 1, 3)), ((2, 1, 1, 3, 6), (0, 4, 2, 3, 1)),
                                              ((4, 3, 6, 4), (1, 2, 0, 3))])  # fmt: skip
def test_a_batch_norm_takes_a_transposed_row_for_channels_last(shape, order, training, dynamic):
    def function(x):
        return batch_norm(x.permute(order), training) * 2

    assert_like_eager(function, torch.randn(shape), gradients=False, dynamic=dynamic)


def test_the_gradient_of_a_batch_norm_has_its_inputs_memory_layout():
    def function(x, weight):
        image = batch_norm(x.view(2, 6, 3, 5), True)
        return F.conv2d(image.to(memory_format=torch.channels_last), weight)

    weight = torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last)
    assert_like_eager(function, torch.randn(2, 90).requires_grad_(), weight.requires_grad_())
