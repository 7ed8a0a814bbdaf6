"""Compiled functions among the rest of a program: optimizers, threads, processes, copies, kinds of tensors."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.errors import IndexOutOfBoundsError
from ort_dynamo.testing import assert_close, assert_like_eager, eager_reasons


def compiled(function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="ort_train", **kwargs)


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))


# -- kinds of tensors --------------------------------------------------------------------------------------------


def kinds() -> dict[str, Callable[[torch.Tensor], Any]]:
    def complex_numbers(x: torch.Tensor) -> Any:
        z = torch.complex(x, x * 2) * (1 + 2j)
        return torch.view_as_real(z) * 2, z.abs() + 1, z.conj(), torch.fft.fft(x * 1).real.sum(), z @ z.mT

    def complex_inside(x: torch.Tensor) -> Any:
        return torch.fft.irfft(torch.fft.rfft(x.exp()) * 0.5).tanh()

    def conjugates_in_the_backward(x: torch.Tensor) -> Any:
        return torch.polar(x.exp(), x) * 0.75

    def float8(x: torch.Tensor) -> Any:
        return (x * 2).to(torch.float8_e4m3fn).to(torch.float32) + 1

    def unsigned(x: torch.Tensor) -> Any:
        return (x * 8).abs().to(torch.uint16).to(torch.int32) + 1

    def in_double(x: torch.Tensor) -> Any:
        return x.double().exp().float() + x.double().sum()

    def only_eager_operators(x: torch.Tensor) -> Any:
        return torch.special.airy_ai(x.detach()), torch.linalg.svdvals(x)

    return {name: f for name, f in locals().items() if callable(f)}


@pytest.mark.parametrize("function", kinds().values(), ids=kinds())
def test_values_that_no_session_takes(function: Callable[[torch.Tensor], Any]) -> None:
    assert_like_eager(function, torch.randn(4, 4, requires_grad=True), allow_eager=True, gradients=False)
    if function.__name__ not in ("float8", "unsigned"):
        assert_like_eager(function, torch.randn(4, 4, requires_grad=True), allow_eager=True)


def test_sparse_tensors_that_dynamo_keeps_out() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm((x.relu() * 2).to_sparse(), x.exp().t()) + 1

    x = torch.randn(4, 4)
    assert_close(compiled(function)(x), function(x), "the product")


def test_fake_quantisation() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x * 2, 0.1, 3, -8, 7) + 1

    assert_like_eager(function, torch.randn(4, 4, requires_grad=True), allow_eager=True)


def test_quantised_values_inside() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        scale, zero = torch.tensor(0.1), torch.tensor(3)
        q = torch.ops.quantized_decomposed.quantize_per_tensor.tensor(x, scale, zero, -128, 127, torch.int8)
        return torch.ops.quantized_decomposed.dequantize_per_tensor.tensor(q, scale, zero, -128, 127, torch.int8) + 1

    import torch.ao.quantization.fx._decomposed

    assert_like_eager(function, torch.randn(4, 4), allow_eager=True, gradients=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_tensors() -> None:
    values, offsets = torch.randn(7, 3), torch.tensor([0, 2, 7])
    results = []
    for run in (lambda f: f, compiled):
        leaf = values.clone().requires_grad_()
        nested = torch.nested.nested_tensor_from_jagged(leaf, offsets)
        result = run(lambda n: (n * 2).sin() + n)(nested)
        result.values().sum().backward()
        results.append((result.values().detach(), leaf.grad))
    assert_close(results[1][0], results[0][0], "the values")
    assert_close(results[1][1], results[0][1], "the gradient")


def test_subclasses_of_tensor_and_of_parameter() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    class Marked(torch.nn.Parameter):
        pass

    weight = Marked(torch.randn(4, 4))
    results = []
    for run in (lambda f: f, compiled):
        a, b = torch.ones(4, 4, requires_grad=True), torch.full((4, 4), 2.0, requires_grad=True)
        weight.grad = None
        result = run(lambda t, w: (t @ w).tanh() * 2)(TwoTensor(a, b), weight)
        assert isinstance(result, TwoTensor)
        torch.sum(result).backward()
        results.append((result.a.detach(), result.b.detach()))
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert_close(mine, theirs, "a part")


# -- the training program ----------------------------------------------------------------------------------------


def test_a_training_step_compiled_whole_with_its_backward() -> None:
    results = []
    for run in (lambda f: f, compiled):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(
            x: torch.Tensor,
            y: torch.Tensor,
            model: torch.nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> Any:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        stepping = run(step)
        losses = [stepping(torch.randn(3, 4), torch.tensor([0, 1, 1])) for _ in range(4)]
        results.append([*losses, *(p.detach() for p in model.parameters())])
    for index, (theirs, mine) in enumerate(zip(*results, strict=True)):
        assert_close(mine, theirs, f"value {index}")


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
    ids=["sgd", "adam", "adamw", "rmsprop", "adagrad"],
)
def test_a_compiled_optimizer_step(make: Callable[..., torch.optim.Optimizer]) -> None:
    theirs = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    ours = copy.deepcopy(theirs)
    optimizers = [make(theirs), make(ours)]
    steps = optimizers[0].step, compiled(optimizers[1].step)
    for _ in range(4):
        for a, b in zip(theirs, ours, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for step in steps:
            step()
    for a, b in zip(theirs, ours, strict=True):
        assert_close(b.detach(), a.detach(), "a parameter")


def test_clipped_gradients_and_scaled_losses() -> None:
    results = []
    for run in (lambda f: f, compiled):
        torch.manual_seed(0)
        model = mlp()
        step = run(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = step(torch.randn(5, 4)).float().square().mean()
        (loss * 1024).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        results.append([loss.detach(), norm, *(p.grad for p in model.parameters())])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=3e-2)


def test_compiled_autograd() -> None:
    model = mlp()
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    step = compiled(model)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="ort_train")):
        step(x).sum().backward()
    for mine, theirs in zip(model.parameters(), expected, strict=True):
        assert_close(mine.grad, theirs, "a gradient")


def test_a_compiled_module_is_saved_loaded_and_copied(tmp_path: Any) -> None:
    model = compiled(mlp())
    x = torch.randn(3, 4)
    expected = model(x)
    torch.save(model.state_dict(), tmp_path / "state")
    other = compiled(mlp())
    other.load_state_dict(torch.load(tmp_path / "state"))
    assert_close(other(x), expected, "after loading")
    assert_close(copy.deepcopy(model)(x), expected, "of a copy")
    state = pickle.loads(pickle.dumps(model.state_dict()))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


# -- threads and processes ---------------------------------------------------------------------------------------


def run_in_threads(*functions: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_two_threads_call_one_compiled_module() -> None:
    model = mlp().requires_grad_(False)
    step = compiled(model)
    inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    expected = [torch.autograd.grad(model(x).sum(), x)[0] for x in inputs]
    torch.autograd.grad(step(inputs[0]).sum(), inputs[0])

    def work(index: int) -> None:
        for _ in range(50):
            found = torch.autograd.grad(step(inputs[index]).sum(), inputs[index])[0]
            assert_close(found, expected[index], f"the gradient in thread {index}")

    run_in_threads(lambda: work(0), lambda: work(1))


def test_two_threads_compile_at_the_same_time() -> None:
    def work(width: int) -> None:
        model = torch.nn.Linear(width, 3)
        x = torch.randn(2, width, requires_grad=True)
        expected = torch.autograd.grad(model(x).tanh().sum(), x)[0]
        found = torch.autograd.grad(compiled(lambda x: model(x).tanh())(x).sum(), x)[0]
        assert_close(found, expected, f"the gradient of width {width}")

    run_in_threads(*(lambda w=w: work(w) for w in (3, 4, 5, 6)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*")
def test_a_child_process_calls_its_parents_compiled_function() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork, torch's as little as ONNX Runtime's
    try:
        step = compiled(lambda x: (x * 2).tanh() + 1)
        expected = step(torch.ones(3))
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(step(torch.ones(3)), expected) else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        torch.set_num_threads(threads)


def test_a_graph_without_any_session_runs() -> None:
    assert_like_eager(lambda x: torch.linalg.svdvals(x), torch.randn(3, 3), gradients=False, allow_eager=True)
    assert eager_reasons()


def out_of_bounds() -> dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]:
    return {
        "rows": lambda x, i: x[i],
        "embedding": lambda x, i: F.embedding(i, x),
        "index_select": lambda x, i: x.index_select(0, i),
        "gather": lambda x, i: x.gather(0, i[None]),
        "scatter": lambda x, i: x.scatter(0, i[None], 1.0),
        "index_put": lambda x, i: x.index_put((i,), torch.zeros(())),
        "cross_entropy": lambda x, i: F.cross_entropy(x[:2], i),
        "embedding_bag": lambda x, i: F.embedding_bag(i[None], x),
        "nothing": lambda x, i: x[:0][i - 7],
    }


@pytest.mark.parametrize("function", out_of_bounds().values(), ids=out_of_bounds())
def test_an_index_out_of_bounds_is_an_error_of_eagers_class(
    function: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    x, index = torch.randn(3, 4), torch.tensor([0, 7])
    with pytest.raises((IndexError, RuntimeError)) as theirs:
        function(x, index)
    with pytest.raises(type(theirs.value)) as ours:
        torch.compile(lambda x, i: function(x, i) + 1, backend="ort_train")(x, index)
    assert isinstance(ours.value, IndexOutOfBoundsError)


def counted_from_the_start() -> dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]:
    rows = torch.ones(2, 4)
    return {
        "embedding": lambda x, i: F.embedding(i, x),
        "embedding_bag": lambda x, i: F.embedding_bag(i[None], x),
        "index_select": lambda x, i: x.index_select(0, i),
        "gather": lambda x, i: x.gather(0, i[:, None]),
        "scatter": lambda x, i: x.scatter(0, i[None], 1.0),
        "scatter_reduce": lambda x, i: x.scatter_reduce(0, i[None], rows[:1, :2], "amax"),
        "index_add": lambda x, i: x.index_add(0, i, rows),
        "index_add of columns": lambda x, i: x.index_add(1, i, rows[:, :3].T),
        "index_copy": lambda x, i: x.index_copy(0, i, rows),
        "index_reduce": lambda x, i: x.index_reduce(0, i, rows, "amax"),
        "nll_loss": lambda x, i: F.nll_loss(x[:2], i),
        "cross_entropy": lambda x, i: F.cross_entropy(x[:2], i),
    }


@pytest.mark.parametrize("function", counted_from_the_start().values(), ids=counted_from_the_start())
def test_a_negative_index_is_out_of_bounds_where_torch_counts_from_the_start_only(
    function: Callable[[torch.Tensor, torch.Tensor], Any],
) -> None:
    """A label of -1 must not train the last class."""
    x, index = torch.randn(3, 4), torch.tensor([0, -1])
    with pytest.raises((IndexError, RuntimeError)):
        function(x, index)
    with pytest.raises(IndexOutOfBoundsError):
        torch.compile(lambda x, i: function(x, i) + 1, backend="ort_train")(x, index)
