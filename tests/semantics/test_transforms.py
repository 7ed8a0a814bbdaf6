"""torch transforms compiled calls: forward-mode differentiation, several gradients at once, fake tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked import run_program
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian

from ort_dynamo.testing import assert_close
from ort_dynamo.torch_internals.aot_cache import AOT_CACHE

Compile = Callable[..., Any]


@pytest.fixture(params=["fastest", "onnxruntime"])
def compiled(request: pytest.FixtureRequest) -> Compile:
    def compile_by(function: Any, **kwargs: Any) -> Any:
        return torch.compile(function, backend="ort_train", options={"placement": request.param}, **kwargs)

    return compile_by


def data(*shape: int) -> Tensor:
    return torch.linspace(-1, 1.5, torch.Size(shape).numel()).reshape(shape)


def dual(x: Tensor) -> Any:
    return forward_ad.make_dual(x, data(*x.shape).cos())


def parts(x: Any) -> tuple[Tensor, Tensor | None]:
    found = forward_ad.unpack_dual(x)
    return found.primal.clone(), None if found.tangent is None else found.tangent.clone()


def compare(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if mine is None or theirs is None:
            assert mine is theirs
        else:
            assert_close(mine, theirs, f"value {index}")


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


# -- forward-mode differentiation --------------------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda x: x.sin() * 2 + x,
    "another dtype": lambda x: (x.double() * 3).float() + x.bfloat16().float(),
    "matmul": lambda x: (x @ torch.ones(4, 4)).relu() @ data(4, 2),
    "softmax": lambda x: x.softmax(1),
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "maximum": lambda x: x.max(1).values,
    "indices": lambda x: x[torch.tensor([2, 0, 0])].cumsum(0),
    "transposed": lambda x: x.t() * 2,
    "a view": lambda x: x.view(-1)[1:],
    "eager between": lambda x: torch.fft.fft(x).abs().log(),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_dual_tensor_keeps_its_tangent(function: Any, dynamic: bool, compiled: Compile) -> None:
    run = compiled(function, dynamic=dynamic)
    for rows in (3, 5):
        compare([run(data(rows, 4))], [function(data(rows, 4))])
        with forward_ad.dual_level():
            found, wanted = (parts(one(dual(data(rows, 4)))) for one in (run, function))
        assert wanted[1] is not None
        compare(found, wanted)
        compare([run(data(rows, 4))], [function(data(rows, 4))])


def test_inputs_that_are_written_to_get_tangents(compiled: Compile) -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        y.add_(x.sin())
        return x + y

    def observed(function: Any) -> list[Any]:
        with forward_ad.dual_level():
            x, y = dual(data(3, 4)), data(3, 4)
            return [value for one in (function(x, y), x, y) for value in parts(one)]

    compare(observed(compiled(write)), observed(write))


def test_random_numbers_equal_eagers(compiled: Compile) -> None:
    def draw(x: Tensor) -> Tensor:
        return x * torch.rand(3, 4) + F.dropout(x, 0.5, training=True)

    def observed(function: Any) -> list[Any]:
        torch.manual_seed(3)
        with forward_ad.dual_level():
            return [*parts(function(dual(data(3, 4)))), torch.rand(2)]

    compare(observed(compiled(draw)), observed(draw))


def test_a_weight_may_be_the_dual_tensor(compiled: Compile) -> None:
    model = nn.Linear(4, 2).requires_grad_(requires_grad=False)

    def call(weight: Tensor, x: Tensor) -> Any:
        return torch.func.functional_call(model, {"weight": weight}, (x,))

    with forward_ad.dual_level():
        found, wanted = (parts(one(dual(data(2, 4)), data(3, 4))) for one in (compiled(call), call))
    compare(found, wanted)


def test_tensors_without_tangent_run_in_sessions_within_a_level(compiled: Compile) -> None:
    function = compiled(lambda x: x.sin() * 2)
    with forward_ad.dual_level():
        found = parts(function(data(3)))
    compare(found, (data(3).sin() * 2, None))


def test_a_conv_net_in_forward_mode_and_vectorized(compiled: Compile) -> None:
    model, x = conv_net()[:5].eval().requires_grad_(requires_grad=False), data(1, 1, 4, 4)
    found, wanted = (jacobian(one, x, vectorize=True, strategy="forward-mode") for one in (compiled(model), model))
    compare([found], [wanted])


@pytest.mark.parametrize(
    "options", [{"debug": {"verify_values": True}}, {}], ids=["first call node by node", "as written"]
)
def test_the_first_call_may_be_a_dual_one(options: dict[str, Any]) -> None:
    run = torch.compile(torch.sin, backend="ort_train", options={"placement": "onnxruntime", **options})
    with forward_ad.dual_level():
        compare(parts(run(dual(data(3)))), parts(torch.sin(dual(data(3)))))
    compare([run(data(3))], [data(3).sin()])


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vmap": lambda f, x: torch.vmap(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_around_and_inside(transform: Any, compiled: Compile) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() * x

    wanted = transform(function, data(3, 4))
    compare([transform(compiled(function), data(3, 4))], [wanted])
    compare([compiled(lambda x: transform(function, x))(data(3, 4))], [wanted])


@pytest.mark.parametrize("arithmetic", [lambda x: x.sin() * 2, lambda x: 3.5 / x])
def test_numbers_in_vmaps_of_vmaps(arithmetic: Any, compiled: Compile) -> None:
    def gradients(function: Any) -> list[Tensor]:
        x = data(3, 4).requires_grad_()
        y = function(x)
        return [y, *torch.autograd.grad(y.sum(), x)]

    nested = torch.vmap(torch.vmap(arithmetic))
    compare(gradients(compiled(nested)), gradients(nested))


# -- several gradients at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_vectorized_jacobian(function: Any, dynamic: bool, compiled: Compile) -> None:
    run = compiled(function, dynamic=dynamic)
    try:
        jacobian(torch.compile(function, backend="aot_eager"), data(3, 4), vectorize=True)
    except RuntimeError:  # AOTAutograd copies a tangent into the strides that it expected, which vmap refuses
        pytest.skip("aot_eager cannot")
    torch._dynamo.reset()
    for rows in (3, 5):
        found, wanted = (jacobian(one, data(rows, 4), vectorize=True) for one in (run, function))
        compare([found], [wanted])


def test_gradients_of_a_conv_net_at_once_and_then_one(compiled: Compile) -> None:
    def observed(compile_by: Any) -> list[Tensor]:
        model = conv_net()
        y = compile_by(model)(data(2, 1, 4, 4))
        weights = list(model.parameters())
        several = torch.eye(6).reshape(6, 2, 3)
        batch = torch.autograd.grad(y, weights, several, is_grads_batched=True, retain_graph=True)
        return [*batch, *torch.autograd.grad(y, weights, several[0])]

    compare(observed(compiled), observed(lambda model: model))


def test_one_of_two_results_has_several_gradients(compiled: Compile) -> None:
    def function(x: Tensor) -> Any:
        return x.sin(), x.exp().sum(1)

    def observed(run: Any) -> Any:
        x = data(3, 4).requires_grad_()
        return torch.autograd.grad(run(x)[1], x, torch.eye(3), is_grads_batched=True)

    compare(observed(compiled(function)), observed(function))


def test_gradcheck_looks_at_batches_and_forward_mode(compiled: Compile) -> None:
    x = data(3, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(compiled(lambda x: x.sin() * x), (x,), check_batched_grad=True)
    x = data(3, 4).double()
    with forward_ad.dual_level():
        found = parts(compiled(lambda x: x.sin() * x)(dual(x)))
    assert found[1] is not None


# -- tangents and inputs that are no plain tensors ---------------------------------------------------------------------

TANGENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda g: g[:1].expand(3, 4),
    "negated": torch._neg_view,
    "of conjugates": lambda g: torch.complex(g, g).conj().imag,
    "zeros without memory": lambda g: torch._efficientzerotensor(g.shape),
    "dual": dual,
}


@pytest.mark.parametrize("make", TANGENTS.values(), ids=TANGENTS)
def test_a_backward_takes_any_tangent(make: Any, compiled: Compile) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() * x

    def observed(run: Any) -> Any:
        x = data(3, 4).requires_grad_()
        y = run(x)
        with forward_ad.dual_level():
            return parts(torch.autograd.grad(y, x, make(data(3, 4)))[0])

    compare(observed(compiled(function)), observed(function))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_zeros_without_memory_are_inputs(requires_grad: bool, compiled: Compile) -> None:
    x = torch._efficientzerotensor((3, 4)).requires_grad_(requires_grad)
    y = compiled(lambda x: x.sin() * 2 + 1)(x)
    assert_close(y.detach(), torch.ones(3, 4), "the result")
    if requires_grad:
        y.sum().backward()
        assert_close(x.grad, torch.full((3, 4), 2.0), "the gradient")


def test_fake_tensors_may_have_symbolic_results(compiled: Compile) -> None:
    model = compiled(lambda x: x[x > 0].exp(), dynamic=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        model(data(3, 4))
        with FakeTensorMode():
            y = compiled(lambda x: x.sin().t(), dynamic=True)(torch.rand(3, 4))
    assert tuple(y.shape) == (4, 3)
    assert y.stride() == (1, 4)


# -- stored graphs -----------------------------------------------------------------------------------------------------

PROGRAM = """
import torch
from torch.autograd import forward_ad
from torch._dynamo.utils import counters
import ort_dynamo

run = torch.compile(lambda x: x.sin() * x.shape[0], backend="ort_train", options={"placement": "onnxruntime"})
x = torch.tensor([1.0, 2.0, 3.0])
run(x)
with forward_ad.dual_level():
    tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.ones(3)))).tangent
assert torch.allclose(tangent, x.cos() * 3)
x.requires_grad_()
found = torch.autograd.grad(run(x), x, torch.eye(3), is_grads_batched=True)[0]
assert torch.allclose(found, (x.cos() * 3).diag())
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.skipif(not AOT_CACHE, reason="this torch keeps nothing of a backend of others")
def test_a_graph_read_from_disk_takes_dual_tensors(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "ORT_DYNAMO_CACHE": "1",
        "ORT_DYNAMO_CACHE_DIR": str(tmp_path / "cache"),
        "ORT_DYNAMO_TRACE_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
    }
    hits = []
    for variables in ({}, {"PYTHONHASHSEED": "2"}):
        done = run_program(PROGRAM, env=environment | variables)
        assert done.returncode == 0, done.stderr
        hits.append(int(done.stdout.splitlines()[-1]))
    assert hits == [0, 2]


# -- a result that the program writes to -------------------------------------------------------------------------------

WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(1),
    "median": lambda x: x.median(),
    "scatter": lambda x: torch.zeros(3, 4).scatter_reduce(0, torch.zeros(3, 4, dtype=torch.long), x, "amax"),
    "large": lambda x: x.repeat(2000, 20).amax(1),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("select", WRITTEN.values(), ids=WRITTEN)
def test_the_program_may_write_to_an_extremum_after_a_break(select: Any, dynamic: bool, compiled: Compile) -> None:
    def function(x: Tensor) -> Tensor:
        found = select(x)
        torch._dynamo.graph_break()
        found.zero_()
        return (x * x).sum()

    def observed(run: Any) -> Any:
        x = data(3, 4).requires_grad_()
        run(x).backward()
        return x.grad

    counters.clear()
    compare([observed(compiled(function, dynamic=dynamic))], [observed(function)])
    assert counters["ort_train"]


def test_a_result_that_the_gradient_itself_reads_is_still_guarded(compiled: Compile) -> None:
    def function(x: Tensor) -> Tensor:
        found = x.exp()
        torch._dynamo.graph_break()
        return found.mul_(2).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        compiled(function)(data(3, 4).requires_grad_()).backward()
