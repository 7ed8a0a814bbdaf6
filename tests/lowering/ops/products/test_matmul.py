"""Matmuls and their gradients."""

import pytest
import torch

from ort_dynamo.testing import assert_like_eager


def r(*sizes, dtype=torch.float32):
    return torch.randn(sizes, dtype=dtype, requires_grad=True)


SHAPES = [
    ((3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (6, 4, 5)),
    ((4,), (4,)),
    ((3, 4), (4,)),
    ((4,), (4, 5)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)),
    ((1, 1), (1, 1)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES, ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_matmul_of_every_rank_equals_eager(left, right, dynamic):
    assert_like_eager(torch.matmul, r(*left), r(*right), dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_matmul_of_other_dtypes_equals_eager(dtype):
    assert_like_eager(
        lambda a, b, c: (a @ b, a @ b.mT.mT + c), r(3, 4, dtype=dtype), r(4, 5, dtype=dtype), r(5, dtype=dtype)
    )


def test_matmul_of_integers_equals_eager():
    a, b = torch.randint(-9, 9, (3, 4)), torch.randint(-9, 9, (4, 5))
    assert_like_eager(lambda a, b: (a @ b, a.int() @ b.int(), torch.addmm(a[:, :1], a, b)), a, b, gradients=False)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16], ids=str)
def test_sums_of_products_of_large_integers_wrap_as_in_eager(dtype, dynamic):
    c, a, b = (torch.randint(-(1 << 62), 1 << 62, shape).to(dtype) for shape in ((3, 5), (4, 3, 6), (4, 6, 5)))
    function = lambda c, a, b: (torch.addbmm(c, a, b), torch.addbmm(c, a, b, beta=3, alpha=-2))  # noqa: E731
    assert_like_eager(function, c, a, b, gradients=False, dynamic=dynamic)


@pytest.mark.parametrize("left", [False, True], ids=["left", "left.T"])
@pytest.mark.parametrize("right", [False, True], ids=["right", "right.T"])
def test_transposed_operands_equal_eager(left, right):
    def function(a, b, c, d):
        a, c = (a.mT, c.transpose(1, 2)) if left else (a, c)
        b, d = (b.t(), d.permute(0, 2, 1)) if right else (b, d)
        return a @ b, torch.bmm(c, d), a @ b + a.sum() * 2

    m, k = (4, 3) if left else (3, 4), (5, 4) if right else (4, 5)
    assert_like_eager(function, r(*m), r(*k), r(2, *m), r(2, *k))
    assert_like_eager(function, r(*m), r(*k), r(2, *m), r(2, *k), dynamic=True)


@pytest.mark.parametrize("bias", [(5,), (1, 5), (3, 1), (3, 5), ()], ids=str)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, -2), (0, 1.5), (1, 0)])
def test_addmm_equals_eager(bias, beta, alpha):
    assert_like_eager(lambda c, a, b: torch.addmm(c, a, b, beta=beta, alpha=alpha), r(*bias), r(3, 4), r(4, 5))


def test_a_bias_times_zero_is_not_read():
    bias = torch.full((5,), float("nan"))
    assert_like_eager(lambda c, a, b: torch.addmm(c, a, b, beta=0), bias, r(3, 4), r(4, 5))


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, -2), (0, 1.5)])
def test_batched_and_vector_products_equal_eager(beta, alpha):
    scale = {"beta": beta, "alpha": alpha}
    assert_like_eager(lambda c, a, b: torch.baddbmm(c, a, b, **scale), r(1, 5), r(2, 3, 4), r(2, 4, 5))
    assert_like_eager(lambda c, a, b: torch.addmv(c, a, b, **scale), r(3), r(3, 4), r(4))
    assert_like_eager(lambda c, a, b: torch.addbmm(c, a, b, **scale), r(3, 5), r(2, 3, 4), r(2, 4, 5))


def test_products_of_vectors_equal_eager():
    assert_like_eager(
        lambda a, b, m: (torch.dot(a, b), torch.mv(m, a), torch.outer(a, b), torch.vdot(b, a)), r(4), r(4), r(3, 4)
    )
    assert_like_eager(lambda a, b: (torch.outer(a, b), torch.einsum("i,j->ij", a, b)), r(4), r(3), dynamic=True)


@pytest.mark.parametrize(
    "equation", ["bij,bjk->bik", "bhqd,bhkd->bhqk", "bqhd,bkhd->bhqk", "ij,jk,kl->il", "ii->i", "bij->b"]
)
def test_einsum_equals_eager(equation):
    sizes = dict(zip("bhqkdijl", (2, 3, 4, 5, 6, 4, 5, 3), strict=True))
    if equation == "ii->i":
        sizes["i"] = 4
    operands = [r(*(sizes[c] for c in term)) for term in equation.split("->")[0].split(",")]
    assert_like_eager(lambda *a: torch.einsum(equation, *a), *operands)


@pytest.mark.parametrize(
    ("left", "right"),
    [((3, 0), (0, 5)), ((0, 4), (4, 5)), ((2, 3, 0), (2, 0, 5)), ((2, 0, 4), (2, 4, 5)), ((0,), (0,))],
    ids=str,
)
def test_empty_products_equal_eager(left, right):
    assert_like_eager(torch.matmul, r(*left), r(*right))


@pytest.mark.parametrize(
    ("left", "right"), [((2, 0, 1), (2, 1, 0)), ((2, 3, 1), (2, 1, 0)), ((2, 3, 0), (2, 0, 5)), ((0, 3, 4), (0, 4, 5))]
)
def test_empty_batched_products_equal_eager(left, right):
    def function(c, a, b):
        return torch.bmm(a.mT.contiguous().mT, b), torch.addbmm(c, a, b), torch.baddbmm(c, a, b, beta=0.5)

    assert_like_eager(function, r(left[1], right[2]), r(*left), r(*right))


def test_a_linear_layer_without_input_features_gives_its_bias():
    assert_like_eager(torch.nn.functional.linear, r(3, 0), r(5, 0), r(5))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 2, 3, 4)], ids=str)
def test_linear_layers_equal_eager(shape, dynamic):
    assert_like_eager(torch.nn.Linear(4, 5), r(*shape), dynamic=dynamic)
    assert_like_eager(torch.nn.Linear(4, 5, bias=False), r(*shape), dynamic=dynamic)


def test_a_weight_used_twice_equals_eager():
    def tied(x, w):
        return (x @ w).relu() @ w.t()

    assert_like_eager(tied, r(3, 4), r(4, 5))


def test_symbolic_factors_equal_eager():
    def function(c, a, b):
        n = a.shape[0]
        return torch.addmm(c, a, b, beta=n, alpha=2 * n), torch.addmv(c, a, b[:, 0], alpha=n)

    assert_like_eager(function, r(3), r(3, 4), r(4, 3), dynamic=True)


@pytest.mark.parametrize("function", [torch.addmm, torch.baddbmm])
def test_float64_scales_keep_their_precision(function):
    lead = () if function is torch.addmm else (2,)
    c, a, b = (
        torch.randn(*lead, *shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (3, 4), (4, 5))
    )
    assert_like_eager(lambda c, a, b: function(c, a, b, beta=0.7, alpha=0.3), c, a, b)


MIXED = {
    "mm": lambda f, i: f @ i,
    "addmm": lambda f, i: torch.addmm(f, i, i),
    "linear": lambda f, i: torch.nn.functional.linear(i, f, f[0]),
}


@pytest.mark.parametrize("function", MIXED.values(), ids=MIXED.keys())
def test_products_of_two_dtypes_are_torchs_own_error(function):
    with pytest.raises(RuntimeError, match="same dtype") as ours:
        torch.compile(function, backend="ort_train")(torch.randn(3, 3), torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(RuntimeError) as eagers:
        function(torch.randn(3, 3), torch.ones(3, 3, dtype=torch.int64))
    assert type(ours.value) is type(eagers.value)
    assert str(ours.value) == str(eagers.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_long_products_of_vectors_equal_eager(dtype, dynamic):
    x, y = (torch.randint(-9, 9, (100_003,)).to(dtype) / 8 for _ in range(2))
    if not dtype.is_floating_point:
        x, y = x.long(), y.long()
    elif dtype != torch.float16:  # in which eager's sum overflows its digits
        x.requires_grad_()
        assert_like_eager(torch.dot, x, y, dynamic=dynamic)
        return
    assert_like_eager(torch.dot, x[:200], y[:200], gradients=False, dynamic=dynamic)
