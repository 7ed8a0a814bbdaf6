"""Activation functions and their gradients."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.testing import assert_close, assert_like_eager

EDGES = torch.tensor(
    [0.0, -0.0, 1e-8, -1e-8, 1.0, -1.0, 3.0, -3.0, 6.0, 7.0, 25.0, -25.0, 95.0, -95.0, math.inf, math.nan]
)

ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": functools.partial(F.leaky_relu, negative_slope=0.2),
    "elu": F.elu,
    "elu alpha": functools.partial(F.elu, alpha=0.3),
    "celu": functools.partial(F.celu, alpha=1.7),
    "selu": F.selu,
    "hardtanh": functools.partial(F.hardtanh, min_val=-0.4, max_val=1.1),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "softplus": F.softplus,
    "softplus beta": functools.partial(F.softplus, beta=2.5, threshold=3),
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "threshold": functools.partial(F.threshold, threshold=0.2, value=-3.0),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "tanhshrink": F.tanhshrink,
    "softsign": F.softsign,
    "glu": functools.partial(F.glu, dim=1),
}
every_activation = pytest.mark.parametrize("function", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())


@every_activation
def test_value_and_gradient_equal_eager(function):
    x = torch.randn(3, 6, 5) * 3
    strided = torch.randn(2, 5, 6).transpose(1, 2)
    if function is F.logsigmoid:
        strided = strided.contiguous()  # torch's fake kernel keeps other strides than its CPU kernel
    inputs = [x.requires_grad_(), strided.requires_grad_(), torch.empty(0, 4, requires_grad=True)]
    assert_like_eager(lambda *x: [function(one) for one in x], *inputs)


@every_activation
def test_symbolic_sizes_equal_eager(function):
    assert_like_eager(function, torch.randn(3, 6, 5, requires_grad=True), dynamic=True)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "glu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tensors_of_no_dimensions_equal_eager(name, dtype):
    assert_like_eager(ACTIVATIONS[name], torch.tensor(0.7, dtype=dtype, requires_grad=True))


@every_activation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_width_values_equal_eager(function, dtype):
    assert_like_eager(function, (torch.randn(3, 6, 5) * 3).to(dtype).requires_grad_())


@every_activation
def test_edges_equal_eager(function):
    # Nothing at -inf, and no gradient at infinity or nan: torch's vector and scalar code differ there from each other.
    edges = EDGES if "gelu" not in str(function) else EDGES[~EDGES.isposinf()]
    finite = edges[edges.isfinite()]
    assert_like_eager(function, torch.cat([edges] * 4).reshape(1, -1), gradients=False)
    assert_like_eager(function, torch.cat([finite] * 4).reshape(1, -1).requires_grad_())


def test_the_gradient_of_tanh_gelu_is_exact():
    x = torch.cat([torch.linspace(-9, 9, 4001), torch.linspace(-1000, 1000, 201)])
    (exact,) = gradients_of(functools.partial(F.gelu, approximate="tanh"), x.double())
    (found,) = gradients_of(torch.compile(functools.partial(F.gelu, approximate="tanh"), backend="ort_train"), x)
    assert (found - exact).abs().max() < 2.5e-6
    assert (found - exact).abs().mean() < 1.2e-7
    assert not found[x <= -20].any()


def test_the_gradient_of_tanh_gelu_is_finite_where_its_cube_overflows():
    x = torch.tensor([1e13, -1e13, 1e15, -1e15, 1e19, -1e19])
    (found,) = gradients_of(torch.compile(functools.partial(F.gelu, approximate="tanh"), backend="ort_train"), x)
    assert found.tolist() == [1, 0, 1, 0, 1, 0]


def gradients_of(function, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)


@pytest.mark.parametrize(
    "name",
    [
        "relu",
        "silu",
        "sigmoid",
        "tanh",
        "leaky_relu",
        "elu",
        "selu",
        "hardtanh",
        "hardswish",
        "softplus",
        "logsigmoid",
        "hardsigmoid",
        "threshold",
        "gelu",
        "gelu tanh",
    ],
)
def test_float64_values_equal_eager(name):
    assert_like_eager(ACTIVATIONS[name], torch.randn(3, 5, dtype=torch.float64, requires_grad=True))


def test_prelu_equals_eager():
    x = torch.randn(2, 3, 4, requires_grad=True)
    assert_like_eager(F.prelu, x, torch.tensor([0.1, 0.2, -0.3], requires_grad=True))
    assert_like_eager(F.prelu, x, torch.tensor([0.1], requires_grad=True), dynamic=True)


@pytest.mark.parametrize("times", [1, 2000], ids=["small", "large"])
@pytest.mark.parametrize("odd", [1.0, math.inf, math.nan])
def test_the_gradient_of_relu_where_an_end_is_not_finite_equals_eager(odd, times):
    x, grad = torch.tensor([math.nan, -1.0, 1.0, 0.0, 2.0]), torch.tensor([1.0, odd, 3.0, 2.0, odd])
    x, grad = x.repeat(times), grad.repeat(times)
    assert_like_eager(lambda g, x: torch.ops.aten.threshold_backward(g, x, 0), grad, x, gradients=False)
    assert_like_eager(lambda g, x: torch.ops.aten.threshold_backward(g, x, 0), grad, x, gradients=False, dynamic=True)


@pytest.mark.parametrize("slope", [0.0, 1.0, -0.5, 3.0])
def test_unusual_slopes_equal_eager(slope):
    assert_like_eager(lambda x: F.leaky_relu(x, slope), torch.randn(3, 5, requires_grad=True))


def test_symbolic_parameters_equal_eager():
    functions = [
        lambda x, n: F.leaky_relu(x, 1 / n),
        lambda x, n: F.elu(x, 1 / n),
        lambda x, n: F.celu(x, 2 / n),
        lambda x, n: F.softplus(x, beta=n - 2),
        lambda x, n: F.threshold(x, 1 / n, n),
        lambda x, n: F.hardtanh(x, -1 / n, 1 / n),
        lambda x, n: F.softshrink(x, 1 / n),
        lambda x, n: F.hardshrink(x, 1 / n),
    ]
    compiled = torch.compile(lambda x: [f(x, x.shape[0]) for f in functions], backend="ort_train", dynamic=True)
    for rows in (4, 7):  # one graph for both
        x = torch.randn(rows, 5, requires_grad=True)
        expected, actual = [f(x, rows) for f in functions], compiled(x)
        for mine, theirs in zip(actual, expected, strict=True):
            assert_close(mine, theirs, f"output for {rows} rows")
            (slope,), (other,) = (torch.autograd.grad(y.sum(), x, retain_graph=True) for y in (mine, theirs))
            assert_close(slope, other, f"gradient for {rows} rows")


@pytest.mark.parametrize("function", [F.softplus, F.logsigmoid], ids=lambda function: function.__name__)
def test_small_logarithms_keep_their_digits(function):
    sizes = torch.logspace(-20, 1.9, 20000)
    x = torch.cat([sizes, -sizes])
    expected = function(x.double())
    torch._dynamo.reset()
    actual = torch.compile(function, backend="ort_train", fullgraph=True)(x).double()
    assert ((actual - expected) / expected.abs()).abs().max().item() < 4e-7


@pytest.mark.parametrize("beta", [1e10, -1e10, math.inf, 0.5])
def test_softplus_keeps_a_number_whose_product_with_beta_overflows(beta):
    assert_like_eager(lambda x: F.softplus(x, beta=beta), torch.tensor([1e38, 1.0, -1.0, -1e38]).requires_grad_())


@pytest.mark.parametrize("slope", [0.01, 1.0])
def test_leaky_relu_of_edges_and_many_entries_equals_eager(slope):
    x = torch.cat([EDGES, -EDGES])
    assert_like_eager(functools.partial(F.leaky_relu, negative_slope=slope), x, gradients=False)


_LARGE = 90, 70
"""More entries than a choice between two forms takes."""

PIECEWISE = {
    "relu6": F.relu6,
    "hardtanh": functools.partial(F.hardtanh, min_val=-0.4, max_val=1.1),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "elu alpha": functools.partial(F.elu, alpha=-0.3),
    "celu": functools.partial(F.celu, alpha=1.7),
    "selu": F.selu,
    "softplus beta": functools.partial(F.softplus, beta=2.5, threshold=3),
    "softshrink": functools.partial(F.softshrink, lambd=3.0),
    "hardshrink": functools.partial(F.hardshrink, lambd=3.0),
    "hardshrink negative": functools.partial(F.hardshrink, lambd=-1.0),
    "hardshrink infinite": functools.partial(F.hardshrink, lambd=math.inf),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("edges", ["finite", "all"])
@pytest.mark.parametrize("name", PIECEWISE)
def test_large_tensors_equal_eager_at_edges_too(name, edges, dtype):
    x = torch.randn(_LARGE, dtype=dtype) * 3
    steps = torch.tensor([3.0, -3.0, 0.0, 6.0, 1.0, -1.0], dtype=torch.float32)
    around = torch.cat([steps, steps.nextafter(steps + 1), steps.nextafter(steps - 1)]).to(dtype)
    x[0, : len(around)] = around
    if edges == "all":
        # Not nan, of which eager's gradient depends on the place: its vectors and their remainders differ.
        x[1, : len(EDGES) - 1] = EDGES[:-1].to(dtype)
        x[2, :2] = -math.inf
    gradient = torch.randn(_LARGE, dtype=dtype)
    if edges == "all":
        gradient[3, :4] = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
        x[3, :4] = torch.tensor([-4.0, -7.0, 9.0, 9.0])

    def value_and_gradient(function):
        leaf = x.clone().requires_grad_()
        value = function(leaf)
        return value, torch.autograd.grad(value, leaf, gradient)[0]

    function = PIECEWISE[name]
    expected = value_and_gradient(function)
    found = value_and_gradient(torch.compile(function, backend="ort_train", fullgraph=True, dynamic=False))
    for what, one, other in zip(("value", "gradient"), found, expected, strict=True):
        assert_close(one, other, what)


@pytest.mark.parametrize("slope", [0.25, -2.0, math.inf, math.nan])
def test_large_prelu_equals_eager(slope):
    x = torch.randn(3, *_LARGE)
    x[0, 0, : len(EDGES)] = EDGES
    slopes = torch.tensor([0.1, slope, 0.0])
    assert_like_eager(lambda x, w: F.prelu(x.transpose(0, 1), w), x, slopes, gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_large_prelu_of_slopes_up_to_one_equals_eager(dtype):
    x = torch.randn(3, *_LARGE, dtype=dtype)
    x[..., 0, : len(EDGES)] = EDGES.to(dtype)
    slopes = torch.tensor([1e-30, 0.25, 1.0], dtype=dtype)

    def function(x, w):
        y = F.prelu(x.transpose(0, 1), w)
        return y, y.signbit() & ~y.isnan()  # the sign of nan means nothing

    assert_like_eager(function, x, slopes, gradients=False)


@pytest.mark.parametrize("is_result", [False, True])
def test_gradients_of_elu_equal_eager(is_result):
    x, grad = torch.randn(2, *_LARGE)
    assert_like_eager(
        lambda g, x: torch.ops.aten.elu_backward(g, 0.7, 1.3, 0.9, is_result, x), grad, x, gradients=False
    )
