"""Tests of the backend's interface: compiles, results, and errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.compilation.compiler import Compilation
from ort_dynamo.compilation.events import Listener
from ort_dynamo.options.groups import Options
from ort_dynamo.testing import assert_close, assert_like_eager, eager_reasons


def mlp(dropout: float = 0.2) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(8, 2))


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="ort_train", options=options or None)


@torch.library.custom_op("ort_dynamo_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, gradient: gradient * 2)


# -- shapes and tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_an_mlp_with_dropout_equals_eager(batch: int, dynamic: bool) -> None:
    assert_like_eager(mlp(), torch.randn(batch, 4, requires_grad=True), dynamic=dynamic)


def test_a_third_batch_size_compiles_nothing() -> None:
    model = compiled(mlp())
    for batch in (3, 5):
        model(torch.randn(batch, 4)).sum().backward()
    graphs, sessions = counters["ort_train"]["graphs"], CACHE.misses
    for batch in (7, 9, 2):
        model(torch.randn(batch, 4)).sum().backward()
    assert (counters["ort_train"]["graphs"], CACHE.misses) == (graphs, sessions)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: (x, x + 1, x),
        lambda x: (x.t(), x[1:], x.view(-1), x.unsqueeze(0)),
        lambda x: ((x * 2)[:, ::2], (x + 1).expand(2, 3, 4), (x * 3).t()),
        lambda x: (x * 2).split(2, dim=1),
        lambda x: (x.sum(), x.sum(0), x.sum(1, keepdim=True)),
    ],
    ids=["the input", "the input twice", "views of the input", "views of results", "pieces", "sums"],
)
def test_inputs_and_views_as_outputs(function: Callable[..., Any]) -> None:
    x = torch.randn(3, 4)
    assert_like_eager(function, x, gradients=False)
    # AOTAutograd returns views of inputs by itself; with gradients the rest must still be right.
    assert_like_eager(lambda x: function(x * 1), x.requires_grad_())


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3).t(),
        torch.randn(6, 8)[::2, ::2],
        torch.randn(1, 4).expand(3, 4),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.tensor(2.0),
        torch.empty(0, 3),
        torch.randn(1, 1, 3),
    ],
    ids=["transposed", "sliced", "expanded", "channels last", "permuted", "0-d", "empty", "ones"],
)
def test_inputs_of_any_layout(x: torch.Tensor) -> None:
    assert_like_eager(lambda x: ((x * 2).exp(), x + x), x.requires_grad_())


def test_bool_and_integer_tensors() -> None:
    def function(x: torch.Tensor, mask: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x > 0, ~mask, mask & (x > 0), mask.sum(), n + 1, n // 2, n.to(torch.int32), x.long()

    n = torch.tensor([-3, 0, 5])
    assert_like_eager(function, torch.randn(2, 3), torch.rand(2, 3) > 0.5, n, gradients=False)


def test_mutated_arguments_and_buffers() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y.add_(x)
        y[0] = 7
        return x * 2 + y

    assert_like_eager(function, torch.randn(3), torch.randn(3), gradients=False)
    assert_like_eager(torch.nn.BatchNorm1d(4), torch.randn(5, 4, requires_grad=True))


def test_an_argument_written_to_after_it_was_copied_gives_the_right_gradient() -> None:
    def inner(y: torch.Tensor) -> torch.Tensor:
        z = y.clone()
        square = z * z
        y.add_(1)
        return square + y

    x = torch.randn(4, requires_grad=True)
    expected, found = (torch.autograd.grad(run(x * 1).sum(), x)[0] for run in (inner, compiled(inner)))
    assert_close(found, expected, "the gradient")


def test_a_graph_on_two_devices_runs_each_node_on_its_own() -> None:
    a, b = compiled(lambda x, y: (x + 1, y * 2))(torch.ones(3), torch.ones(3, device="meta"))
    assert torch.equal(a, torch.full((3,), 2.0))
    assert b.device.type == "meta"
    ((reason, count),) = eager_reasons().items()
    assert "a tensor on meta" in reason
    assert count == 1


def test_training_with_an_optimizer_in_place_and_accumulation() -> None:
    ours, theirs = mlp(), mlp()
    theirs.load_state_dict(ours.state_dict())
    step = compiled(ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    for index in range(6):
        x = torch.randn(5, 4)
        for model in (step, theirs):
            torch.manual_seed(index)
            model(x).square().sum().backward()
        if index % 2:  # two backwards a step
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_frozen_half_gets_no_gradient() -> None:
    model = mlp()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    assert_like_eager(model, torch.randn(5, 4))


def test_eval_mode_and_no_grad() -> None:
    with torch.no_grad():
        assert_like_eager(mlp().eval(), torch.randn(5, 4), gradients=False)
        assert_like_eager(mlp(), torch.randn(5, 4), gradients=False)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(lambda x: x * 2)(torch.ones(2)), torch.full((2,), 2.0))


def test_retain_graph_runs_the_backward_twice() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = compiled(lambda x: (x.exp() * x).sum())(x)
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_results_outlive_the_compiled_function_and_later_calls() -> None:
    function = compiled(lambda x: x + 1)
    first = function(torch.zeros(1000))
    for _ in range(10):
        function(torch.ones(1000))
    del function
    torch._dynamo.reset()
    assert torch.equal(first, torch.ones(1000))


def test_a_compiled_optimizer_step_equals_eager() -> None:
    ours = torch.nn.Parameter(torch.randn(4, 3))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizers = [torch.optim.AdamW([p], lr=0.1) for p in (ours, theirs)]
    step = compiled(optimizers[0].step)
    for _ in range(3):
        ours.grad = torch.randn(4, 3)
        theirs.grad = ours.grad.clone()
        step()
        optimizers[1].step()
    assert_close(ours.detach(), theirs.detach(), "the parameter")


def test_an_autograd_function_is_traced_through() -> None:
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            result = x.exp()
            ctx.save_for_backward(result)
            return result

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0]

    assert_like_eager(lambda x: Exponential.apply(x) * 2, torch.randn(4, requires_grad=True))


# -- fallbacks ---------------------------------------------------------------------------------------------------


def test_an_unknown_operator_runs_in_eager_alone_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return double(x + 1).tanh() * double(x)

    with caplog.at_level(logging.WARNING, logger="ort_dynamo"):
        assert_like_eager(function, torch.randn(4, requires_grad=True), allow_eager=True)
    reason = "no lowering for ort_dynamo_tests.double.default, a custom operator (register_lowering adds one)"
    assert eager_reasons() == {f"ort_dynamo_tests.double.default: {reason}": 2}
    messages = [r.getMessage() for r in caplog.records if "ort_dynamo_tests.double.default" in r.getMessage()]
    assert len(messages) == 1
    assert "test_backend.py" in messages[0], "the message does not name the user's line"


def test_fallback_error_refuses_at_the_forward_and_names_the_line() -> None:
    with pytest.raises(BackendCompilerFailed, match="FallbackRefusedError") as caught:
        compiled(lambda x: double(x + 1), fallback="error")(torch.randn(4, requires_grad=True))
    text = str(caught.value)
    assert "1 node(s) of the forward graph" in text
    assert "python -m ort_dynamo help add_an_operator" in text
    assert "ort_dynamo_tests.double.default" in text
    assert "test_backend.py" in text


def test_one_hot_keeps_its_assertions_and_has_nothing_in_eager() -> None:
    def chosen(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (F.one_hot(index, 4) * x).sum(-1)

    function = compiled(chosen, fallback="error")
    x = torch.randn(3, 4, requires_grad=True)
    torch.testing.assert_close(function(x, torch.tensor([3, 0, 1])), torch.stack([x[0, 3], x[1, 0], x[2, 1]]))
    try:
        torch.compile(chosen, backend="aot_eager")(x, torch.tensor([3, 4, 1]))
    except RuntimeError:
        with pytest.raises(RuntimeError, match="smaller than num_classes"):
            function(x, torch.tensor([3, 4, 1]))
    else:
        pytest.skip("this torch traces one_hot without its assertions, as torch 2.11 does")


def test_an_unknown_operator_of_the_backward_alone_is_refused_at_the_forward() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return double(gradient)

    function = compiled(lambda x: Doubled.apply(x) + 1, fallback="error")
    with pytest.raises(BackendCompilerFailed, match="of the backward graph"):
        function(torch.randn(4, requires_grad=True))


def test_complex_and_sparse_values_run_in_eager() -> None:
    assert_like_eager(lambda x: torch.fft.rfft(x * 2).abs().sum(), torch.randn(8, requires_grad=True), allow_eager=True)
    assert_like_eager(torch.nn.Embedding(10, 4, sparse=True), torch.tensor([1, 2, 2]), allow_eager=True)


def test_sizes_that_depend_on_data() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        x = torch.randn(10, requires_grad=True)
        assert_like_eager(lambda x: (x * 2)[x > 0].sum(), x, allow_eager=True)
        assert_like_eager(lambda x: x.sum().item() * 2 + x, torch.randn(5), allow_eager=True, gradients=False)
        n = torch.tensor([1, 2])
        assert_like_eager(lambda n: torch.arange(n.sum().item()) + 1, n, allow_eager=True, gradients=False)


def test_conditions_keep_their_branches() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))

    for sign in (1, -1):
        assert_like_eager(function, sign * torch.rand(4), allow_eager=True, gradients=False)


# -- keys and sessions -------------------------------------------------------------------------------------------


def test_the_same_graph_twice_opens_one_session() -> None:
    CACHE.clear()
    before = CACHE.misses
    x = torch.randn(3, 4, requires_grad=True)
    compiled(lambda x: F.relu(x * 3))(x).sum().backward()
    opened = CACHE.misses - before
    compiled(lambda y: F.relu(y * 3))(x).sum().backward()
    assert opened > 0
    assert CACHE.misses - before == opened
    compiled(lambda y: F.relu(y * 4))(x).sum().backward()
    assert CACHE.misses - before > opened


def test_a_graph_that_trains_has_a_session_of_its_own_as_its_order_counts() -> None:
    CACHE.clear()
    before = CACHE.misses
    for role, sessions in (("inference", 1), ("forward", 2), ("backward", 2), ("inference", 2)):
        x = torch.ones(2)
        gm = make_fx(lambda x: (x + 1,), tracing_mode="fake")(x)
        function = Compilation(Options(), x.device, 1, Listener()).graph(gm, role, slice(None))
        assert_close(function([x])[0], x + 1, role)
        assert CACHE.misses - before == sessions


def test_a_graph_in_memory_is_saved_when_asked(tmp_path: Path) -> None:
    for options in ({}, {"save_onnx": str(tmp_path)}):
        compiled(lambda x: x + 1, **options)(torch.ones(2))
    assert len(list(tmp_path.glob("inference-*.onnx"))) == 1


def test_torchs_own_settings_decide_about_the_session() -> None:
    threads = torch.get_num_threads()
    before = CACHE.misses
    try:
        for number, function in ((1, lambda x: x + 1), (2, lambda y: y + 1), (1, lambda z: z + 1)):
            torch.set_num_threads(number)
            compiled(function)(torch.ones(2))
    finally:
        torch.set_num_threads(threads)
    assert CACHE.misses - before == 2


def test_reset_forgets_the_sessions() -> None:
    compiled(lambda x: x + 1)(torch.ones(2))
    assert len(CACHE)
    torch._dynamo.reset()
    assert not len(CACHE)


# -- options and files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"options": {"falback": "error"}}, "UnknownOptionError", "did you mean 'fallback'"),
        ({"options": {"fallback": "never"}}, "InvalidOptionError", "expected one of 'eager', 'error'"),
        ({"options": {"threads": 0}}, "InvalidOptionError", "an int >= 1"),
        ({"mode": "debgu"}, "UnknownModeError", "did you mean 'debug'"),
        ({"mode": "max-autotune"}, "UnknownModeError", "'max-autotune' and the like belong to inductor"),
    ],
)
def test_bad_options_are_refused_with_the_nearest_valid_ones(kwargs: Any, error: str, message: str) -> None:
    function = torch.compile(lambda x: x + 1, backend="ort_train", **kwargs)
    with pytest.raises(BackendCompilerFailed, match=error) as caught:
        function(torch.ones(2))
    assert message in str(caught.value)


def test_debug_mode_checks_models_and_gives_the_same() -> None:
    torch._dynamo.reset()
    x = torch.randn(3, 4)
    function = torch.compile(lambda x: F.softmax(x * 2, -1), backend="ort_train", mode="debug")
    torch.testing.assert_close(function(x), F.softmax(x * 2, -1))


def test_saved_models_are_valid_onnx_whose_parameters_are_inputs(tmp_path: Path) -> None:
    model = mlp(dropout=0.0)
    compiled(model, save_onnx=str(tmp_path / "new" / "folder"))(torch.randn(3, 4)).sum().backward()
    files = sorted((tmp_path / "new" / "folder").glob("*.onnx"))
    assert [f.name.split("-")[0] for f in files] == ["backward", "forward"]
    for file in files:
        saved = onnx.load(file)
        onnx.checker.check_model(saved, full_check=False)
        assert all(len(init.dims) < 2 or 8 not in init.dims for init in saved.graph.initializer)
    assert len(onnx.load(files[1]).graph.input) == 5  # x and four parameters


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendCompilerFailed, match="file"):
        compiled(lambda x: x + 1, save_onnx=str(tmp_path / "file" / "folder"))(torch.ones(2))
