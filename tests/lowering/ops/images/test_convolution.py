"""Convolutions and their gradients."""

import copy

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from ort_dynamo.lowering.ops.images import convolution
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.testing import assert_like_eager, patch_facts

CONVOLUTIONS = {
    "1d": (nn.Conv1d(4, 6, 3), (2, 4, 11)),
    "1d stride padding dilation groups": (nn.Conv1d(4, 6, 3, stride=2, padding=3, dilation=2, groups=2), (2, 4, 12)),
    "1d long kernel": (nn.Conv1d(1, 2, 17, stride=3, padding=8), (2, 1, 40)),
    "1d depthwise with stride": (nn.Conv1d(64, 64, 7, stride=2, padding=3, groups=64, bias=False), (4, 64, 16)),
    "2d": (nn.Conv2d(3, 5, 3), (2, 3, 7, 8)),
    "2d without bias": (nn.Conv2d(3, 5, 3, padding=1, bias=False), (2, 3, 6, 5)),
    "2d pointwise": (nn.Conv2d(6, 4, 1), (2, 6, 5, 4)),
    "2d pointwise with stride": (nn.Conv2d(6, 4, 1, stride=2), (2, 6, 6, 7)),
    "2d pointwise with padding": (nn.Conv2d(3, 4, 1, padding=1), (2, 3, 5, 5)),
    "2d stride without remainder": (nn.Conv2d(3, 5, 3, stride=2, padding=1), (2, 3, 9, 7)),
    "2d stride with remainder": (nn.Conv2d(3, 5, 3, stride=2), (2, 3, 8, 10)),
    "2d stride beyond the kernel": (nn.Conv2d(3, 5, 2, stride=4), (2, 3, 9, 11)),
    "2d patches": (nn.Conv2d(3, 8, 4, stride=4), (2, 3, 8, 12)),
    "2d stem": (nn.Conv2d(3, 4, 7, stride=2, padding=3), (2, 3, 16, 18)),
    "2d big kernel": (nn.Conv2d(2, 4, 5, stride=3, padding=2, dilation=2), (2, 2, 17, 19)),
    "2d unequal": (nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 1)), (2, 4, 9, 8)),
    "2d groups": (nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 6, 5)),
    "2d groups with stride": (nn.Conv2d(6, 3, 3, stride=2, groups=3), (2, 6, 8, 9)),
    "2d big kernel with groups": (nn.Conv2d(4, 8, 5, stride=2, padding=1, groups=2), (2, 4, 12, 12)),
    "2d depthwise": (nn.Conv2d(4, 4, 3, padding=1, groups=4), (2, 4, 6, 6)),
    "2d depthwise with stride": (nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=4), (2, 4, 7, 8)),
    "2d depthwise with multiplier": (nn.Conv2d(3, 6, 3, groups=3, bias=False), (2, 3, 6, 6)),
    "2d depthwise big kernel": (nn.Conv2d(4, 4, 5, padding=2, groups=4), (2, 4, 9, 8)),
    "2d padding beyond the kernel": (nn.Conv2d(2, 3, 2, padding=3), (2, 2, 4, 4)),
    "2d same": (nn.Conv2d(2, 3, 3, dilation=2, padding="same"), (1, 2, 6, 6)),
    "2d more weights than places": (nn.Conv2d(8, 9, 3, padding=1), (1, 8, 4, 5)),
    "2d without a batch": (nn.Conv2d(2, 3, 3), (2, 6, 6)),
    "3d": (nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1), (2, 2, 4, 5, 3)),
    "3d groups dilation": (nn.Conv3d(4, 4, 3, dilation=(1, 2, 1), padding=2, groups=2), (1, 4, 4, 5, 4)),
    "transposed 1d": (nn.ConvTranspose1d(4, 3, 3), (2, 4, 7)),
    "transposed 1d long kernel": (nn.ConvTranspose1d(2, 3, 18, stride=4, output_padding=3), (2, 2, 5)),
    "transposed 2d": (nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1), (2, 4, 5, 6)),
    "transposed 2d output padding": (nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1), (2, 4, 5, 6)),
    "transposed 2d groups": (nn.ConvTranspose2d(4, 6, (2, 3), stride=(3, 1), groups=2, bias=False), (2, 4, 4, 5)),
    "transposed 2d dilation": (nn.ConvTranspose2d(2, 3, 3, stride=2, dilation=2, padding=1), (2, 2, 4, 5)),
    "transposed 2d depthwise": (nn.ConvTranspose2d(3, 3, 4, stride=2, padding=1, groups=3), (2, 3, 4, 4)),
    "transposed 3d": (nn.ConvTranspose3d(2, 3, 2, stride=2, output_padding=(0, 1, 0)), (1, 2, 3, 3, 2)),
}


FORMS = (
    ["training kernels", "standard operators"] if installed_runtime().has_gradient_kernels else ["standard operators"]
)


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """The gradient kernel of the training build, where it is installed, and the form that every runtime has."""
    if request.param == "standard operators":
        monkeypatch.setattr(convolution._Gradient, "_has_conv_grad", False)


def image(shape):
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution_and_its_gradients_equal_eager(case, form):
    module, shape = CONVOLUTIONS[case]
    assert_like_eager(module, image(shape))


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_the_gradient_of_a_weight_as_one_convolution_equals_eager(case, monkeypatch):
    monkeypatch.setattr(convolution._Gradient, "_has_conv_grad", False)
    patch_facts(monkeypatch, weighs_by_convolution=True)  # as on CUDA
    module, shape = CONVOLUTIONS[case]
    assert_like_eager(module, image(shape))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(8, 8, 3, groups=8), (2, 8, 9)),
        (nn.Conv3d(4, 4, 2, groups=2), (1, 4, 3, 4, 3)),
        (nn.ConvTranspose1d(8, 8, 3, groups=8), (2, 8, 9)),
    ],
)
def test_groups_in_one_or_three_dimensions_do_without_the_kernel_that_overwrites_memory(module, shape, tmp_path):
    torch.compile(module, backend="ort_train", options={"save_onnx": tmp_path})(image(shape)).sum().backward()
    graphs = [onnx.load(file).graph for file in tmp_path.glob("*.onnx")]
    assert len(graphs) == 2
    assert "ConvGrad" not in {node.op_type for graph in graphs for node in graph.node}


@pytest.mark.parametrize("case", ["2d stride with remainder", "2d groups", "3d", "transposed 2d output padding"])
def test_gradients_for_another_device_equal_eager(case, monkeypatch):
    monkeypatch.setattr(convolution._Gradient, "_prefers_products", False)
    monkeypatch.setattr(convolution._Gradient, "_has_conv_grad", False)
    module, shape = CONVOLUTIONS[case]
    assert_like_eager(module, image(shape))


def test_gradient_with_a_big_kernel_for_another_device_equals_eager(monkeypatch):
    monkeypatch.setattr(convolution._Gradient, "_prefers_products", False)
    monkeypatch.setattr(convolution._Gradient, "_has_conv_grad", False)
    assert_like_eager(nn.Conv2d(1, 2, 5, stride=2, padding=2), image((2, 1, 9, 10)))


@pytest.mark.parametrize(
    "case",
    ["1d stride padding dilation groups", "2d", "2d stride with remainder", "2d stem", "2d big kernel", "2d groups",
     "2d big kernel with groups", "2d depthwise with stride", "2d stride beyond the kernel", "3d",
     "transposed 2d output padding"],
)  # fmt: skip
def test_convolution_with_symbolic_sizes_equals_eager(case, form):
    module, shape = CONVOLUTIONS[case]
    # A batch of 7, because equal sizes share a symbol, and the channels are fixed by the weight.
    assert_like_eager(module, image((7, *shape[1:])), dynamic=True)


def test_one_compilation_serves_images_of_other_sizes(form):
    module = nn.Conv2d(2, 4, 5, stride=3, padding=1)
    compiled = torch.compile(module, backend="ort_train", dynamic=True, fullgraph=True)
    for size in ((7, 2, 16, 18), (3, 2, 17, 19), (5, 2, 12, 20)):
        x, grad = image(size), None
        for function in (module, compiled):
            y = function(x)
            found = torch.autograd.grad(y, [x, module.weight], torch.ones_like(y))
            for mine, theirs in zip(found, grad or found, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
            grad = found
    assert counters["ort_train"]["graphs"] == 2


@pytest.mark.parametrize("needed", ["x", "w", "b", "xw", "xb", "wb"])
def test_only_the_gradients_asked_for_are_computed(needed, form):
    x, w, b = torch.randn(2, 4, 7, 7), torch.randn(6, 2, 3, 3), torch.randn(6)
    for name, tensor in (("x", x), ("w", w), ("b", b)):
        tensor.requires_grad_(name in needed)
    assert_like_eager(lambda x, w, b: functional.conv2d(x, w, b, stride=2, groups=2), x, w, b)


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 2), (2, 0), (2, 1), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transposed_convolution_with_output_padding_beyond_the_stride_equals_eager(dtype, stride, padding):
    x = torch.randn(2, 3, 5, dtype=dtype, requires_grad=True)
    w, b = torch.randn(3, 4, 3, dtype=dtype, requires_grad=True), torch.randn(4, dtype=dtype, requires_grad=True)
    options = {"stride": stride, "dilation": 3, "padding": padding, "output_padding": 2}
    assert_like_eager(lambda x, w, b: functional.conv_transpose1d(x, w, b, **options), x, w, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_width_convolution_equals_eager(dtype, form):
    assert_like_eager(nn.Conv2d(3, 4, 3, stride=2).to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype, requires_grad=True))


def test_convolution_of_channels_last_tensors_equals_eager(form):
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    assert_like_eager(nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last), x)


def test_convolution_of_an_empty_batch_equals_eager():
    assert_like_eager(nn.Conv2d(3, 4, 3), torch.randn(0, 3, 8, 8, requires_grad=True))


def test_convolution_after_convolution_equals_eager(form):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Conv2d(8, 2, 1))
    assert_like_eager(net, image((2, 1, 12, 12)))


@pytest.mark.parametrize(
    "case",
    ["1d stride padding dilation groups", "2d", "2d stride without remainder", "2d stride with remainder",
     "2d stride beyond the kernel", "2d patches", "2d unequal", "2d groups", "2d padding beyond the kernel", "3d",
     "transposed 1d", "transposed 2d output padding", "transposed 2d groups", "transposed 2d dilation"],
)  # fmt: skip
def test_float64_convolution_without_a_kernel_equals_eager(case):
    module, shape = CONVOLUTIONS[case]
    assert_like_eager(copy.deepcopy(module).double(), image(shape).detach().double().requires_grad_())


@pytest.mark.parametrize("case", ["2d stride with remainder", "2d groups", "2d patches", "transposed 2d groups"])
def test_float64_convolution_with_symbolic_sizes_equals_eager(case):
    module, shape = CONVOLUTIONS[case]
    x = torch.randn((7, *shape[1:]), dtype=torch.float64, requires_grad=True)
    assert_like_eager(copy.deepcopy(module).double(), x, dynamic=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_convolution_of_integers_equals_eager(dtype):
    x, w = torch.randint(0, 99, (2, 4, 6, 7)).to(dtype), torch.randint(0, 99, (6, 2, 3, 2)).to(dtype)
    assert_like_eager(lambda x, w: functional.conv2d(x, w, stride=2, padding=1, groups=2), x, w, gradients=False)


@pytest.mark.parametrize(
    ("function", "image", "weight"),
    [
        (F.conv1d, (2, 3, 11), (4, 3, 3)),
        (F.conv2d, (2, 3, 9, 10), (4, 3, 3, 2)),
        (F.conv3d, (2, 3, 6, 7, 8), (4, 3, 2, 3, 2)),
        (F.conv_transpose1d, (2, 3, 11), (3, 4, 3)),
        (F.conv_transpose2d, (2, 3, 5, 6), (3, 4, 3, 2)),
    ],
)
@pytest.mark.parametrize(
    "call",  # numbers in the code, which stay fixed
    [
        lambda f, *tensors: f(*tensors),
        lambda f, *tensors: f(*tensors, stride=3, padding=1),
        lambda f, *tensors: f(*tensors, stride=2, dilation=2, padding=2),
    ],
    ids=["plain", "stride", "dilation"],
)
def test_a_weight_of_symbolic_sizes_equals_eager(function, image, weight, call):
    bias = torch.randn(4, requires_grad=True)
    x, w = torch.randn(image, requires_grad=True), torch.randn(weight, requires_grad=True)
    assert_like_eager(lambda x, w, b: call(function, x, w, b), x, w, bias, dynamic=True)


def test_groups_with_a_weight_of_symbolic_sizes_equal_eager():
    def function(x, w, v):
        plain = F.conv2d(x, w, groups=2, stride=2, padding=1)
        return plain, F.conv_transpose2d(x, v, groups=2, stride=2, padding=1, output_padding=1)

    x, w = torch.randn(2, 6, 9, 8, requires_grad=True), torch.randn(4, 3, 3, 2, requires_grad=True)
    assert_like_eager(function, x, w, torch.randn(6, 3, 3, 2, requires_grad=True), dynamic=True)
    assert_like_eager(lambda x, w: F.conv2d(x, w), x.detach().bfloat16(), torch.randn(4, 6, 3, 2).bfloat16(),
                      gradients=False, dynamic=True)  # fmt: skip


def test_too_much_output_padding_is_torchs_own_error():
    net = torch.nn.ConvTranspose2d(3, 6, 3, stride=1, padding=1, output_padding=1)
    with pytest.raises(RuntimeError, match="output padding must be smaller than either stride or dilation"):
        torch.compile(net, backend="ort_train")(torch.randn(1, 3, 8, 8))
