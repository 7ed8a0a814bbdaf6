"""A model that is not compiled is an error at its first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from traced_containers import dynamo_traces_its_own_containers

import ort_dynamo
from ort_dynamo.errors import InvalidArgumentError, NotCompiledError, NotInOnnxRuntimeError


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Half(nn.Module):
    """Its own code is compiled, that of its child is not."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Recurrent()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return self.child(x) + 1


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Images(nn.Module):
    """A net that torch runs by choice, wholly."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.conv(x)).relu().mean((2, 3)))


@torch.library.custom_op("ort_dynamo_alone::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    return x / 2


@halve.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Halved(torch.autograd.Function):
    """Its backward alone has an operator that ONNX Runtime cannot run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return halve(gradient)


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="ort_train")
    return model


def wrapped(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="ort_train")


@pytest.mark.parametrize("compile_", [in_place, wrapped])
def test_a_compiled_module_is_itself_again_after_its_first_call(compile_: Callable[[nn.Module], nn.Module]) -> None:
    plain = Plain()
    model = compile_(plain)
    before = dict(model.__dict__)
    assert ort_dynamo.require_compiled(model) is model
    assert dict(model.__dict__) != before
    x = torch.randn(2, 3)
    torch.testing.assert_close(model(x), plain.linear(x))
    assert dict(model.__dict__) == before


def test_a_session_that_was_there_before_counts() -> None:
    model = wrapped(Plain())
    model(torch.ones(1, 3))
    ort_dynamo.require_compiled(model)(torch.ones(1, 3))


def test_a_function_is_looked_at_once() -> None:
    function = ort_dynamo.require_compiled(torch.compile(lambda x: x + 1, backend="ort_train"))
    with torch.compiler.set_stance("force_eager"), pytest.raises(NotCompiledError, match="no graph was compiled"):
        function(torch.ones(2))
    function(torch.ones(2))
    with torch.compiler.set_stance("force_eager"):
        function(torch.ones(2))


@pytest.mark.parametrize("compile_", [in_place, wrapped])
@pytest.mark.parametrize("model", [Recurrent, Half])
def test_a_function_that_dynamo_gives_up_on_is_refused_each_time(
    model: type[nn.Module], compile_: Callable[[nn.Module], nn.Module]
) -> None:
    compiled = ort_dynamo.require_compiled(compile_(model()), whole=True)
    for _ in range(2 if model is Recurrent else 1):  # Dynamo looks at a frame once
        with pytest.raises(NotCompiledError, match=r"runs in eager"):
            compiled(torch.ones(2, 1, 3))


def test_the_reasons_have_functions_and_lines() -> None:
    compiled = ort_dynamo.require_compiled(wrapped(Recurrent()))
    with pytest.raises(
        NotCompiledError, match=r"(?s)Recurrent runs in eager.*forward \(.*alone_require.py:\d+\).*LSTM"
    ):
        compiled(torch.ones(2, 1, 3))


class Around(nn.Module):
    """Its own code does nothing, and calls a module that Dynamo leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Recurrent()

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)


@pytest.mark.parametrize("compile_", [in_place, wrapped])
@pytest.mark.parametrize("model", [Recurrent, Around])
def test_an_earlier_call_does_not_hide_the_cause(
    model: type[nn.Module], compile_: Callable[[nn.Module], nn.Module]
) -> None:
    compiled = compile_(model())
    compiled(torch.ones(2, 1, 3))
    with pytest.raises(NotCompiledError, match=r"(?s)^\w+ runs in eager:\n.*alone_require.py:\d+\).*allow_rnn = True"):
        ort_dynamo.require_compiled(compiled)(torch.ones(2, 1, 3))


def test_the_cause_of_another_model_is_not_given() -> None:
    wrapped(nn.Sequential(nn.LSTM(3, 4)))(torch.ones(2, 1, 3))
    model = wrapped(nn.Sequential(nn.Linear(3, 4)))
    with torch.compiler.set_stance("force_eager"), pytest.raises(NotCompiledError, match="no graph was compiled"):
        ort_dynamo.require_compiled(model)(torch.ones(1, 3))


def test_a_module_whose_code_was_skipped_for_another_has_the_cause_of_that_one() -> None:
    wrapped(nn.LSTM(3, 4))(torch.ones(2, 1, 3))
    for model in (nn.LSTM(3, 4), nn.Linear(3, 4)):
        with pytest.raises(NotCompiledError, match=r"(?s)gave up on the same code .*LSTM\.forward.*allow_rnn = True"):
            ort_dynamo.require_compiled(wrapped(model))(torch.ones(2, 1, 3))
    torch.compiler.reset()
    ort_dynamo.require_compiled(wrapped(nn.Linear(3, 4)))(torch.ones(2, 1, 3))


def test_a_part_in_eager_is_called_a_part() -> None:
    with pytest.raises(NotCompiledError, match=r"^A part of Half runs in eager:\n"):
        ort_dynamo.require_compiled(wrapped(Half()), whole=True)(torch.ones(2, 1, 3))


def test_a_part_in_eager_is_taken_where_the_whole_is_not_asked_for() -> None:
    ort_dynamo.require_compiled(wrapped(Half()))(torch.ones(2, 1, 3))


def test_a_module_of_torch_itself_is_refused_with_the_rule_by_which_dynamo_leaves_it_out() -> None:
    model = in_place(nn.Sequential(nn.Linear(3, 2)))
    ort_dynamo.require_compiled(model)
    if dynamo_traces_its_own_containers():
        model(torch.ones(1, 3))
        return
    for _ in range(2):
        with pytest.raises(NotCompiledError, match=r"(?s)Sequential runs in eager.*(?i:skip).*torch.compile\(module\)"):
            model(torch.ones(1, 3))
    assert ort_dynamo.summary().skipped[0].function == "Sequential.forward"


def test_another_backend_is_refused() -> None:
    model = ort_dynamo.require_compiled(torch.compile(Plain(), backend="eager"))
    with pytest.raises(NotCompiledError):
        model(torch.ones(1, 3))


@pytest.mark.parametrize("model", [Plain(), lambda x: x])
def test_an_uncompiled_model_is_refused_at_once(model: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotCompiledError, match=r"torch\.compile was not called on it"):
        ort_dynamo.require_compiled(model)


def test_an_error_of_the_call_is_its_own() -> None:
    model = ort_dynamo.require_compiled(wrapped(Plain()))
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(1, 4))
    assert not isinstance(raised.value, NotCompiledError)
    model(torch.ones(1, 3))


# -- torch's choice, and fallbacks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compile_", [in_place, wrapped])
@pytest.mark.parametrize("whole", [False, True])
def test_a_net_that_torch_runs_by_choice_is_compiled(compile_: Callable[[nn.Module], nn.Module], whole: bool) -> None:
    model = ort_dynamo.require_compiled(compile_(Images()), whole=whole)
    model(images()).sum().backward()
    found = ort_dynamo.summary()
    assert (found.graphs, found.islands, found.eager_nodes) == (2, 0, 0)
    assert found.chosen


def test_a_net_that_torch_runs_by_choice_is_not_in_onnx_runtime() -> None:
    model = ort_dynamo.require_compiled(wrapped(Images()), whole="onnxruntime")
    with pytest.raises(NotInOnnxRuntimeError) as raised:
        model(images())
    text, found = str(raised.value), ort_dynamo.summary()
    counts = f"0 in ONNX Runtime, 0 in torch by design, {found.chosen.total()} in torch by choice (placement)"
    assert text.startswith("Images does not run in ONNX Runtime alone, which whole='onnxruntime' requires:\n")
    assert f"  nodes (forward, backward): {counts}, 0 in eager (fallback)\n  in torch by choice (placement):\n" in text
    assert "kept in torch together with the convolutions around it\n" in text
    assert text.endswith('Set options={"placement": "onnxruntime"} to run these operators in ONNX Runtime.')
    with pytest.raises(NotInOnnxRuntimeError):  # it is looked at until it passes
        model(images())


def test_the_option_that_the_error_names_is_the_one_that_helps() -> None:
    compiled = torch.compile(Images(), backend="ort_train", options={"placement": "onnxruntime"})
    ort_dynamo.require_compiled(compiled, whole="onnxruntime")(images()).sum().backward()
    found = ort_dynamo.summary()
    assert (found.islands, found.chosen.total(), found.eager_nodes) == (2, 0, 0)


def test_a_graph_that_was_compiled_before_is_looked_at_as_well() -> None:
    model = wrapped(Images())
    model(images())
    torch.compile(Plain(), backend="ort_train")(torch.ones(1, 3))
    ort_dynamo.require_compiled(model)(images())
    with pytest.raises(NotInOnnxRuntimeError, match="in torch by choice"):
        ort_dynamo.require_compiled(model, whole="onnxruntime")(images())


def test_a_graph_of_another_model_does_not_count() -> None:
    wrapped(Images())(images())
    ort_dynamo.require_compiled(wrapped(Plain()), whole="onnxruntime")(torch.ones(1, 3))


def test_the_backward_of_a_graph_that_ran_counts() -> None:
    def backward_in_eager(x: Tensor) -> Tensor:
        return Halved.apply(x.sin())

    model = ort_dynamo.require_compiled(torch.compile(backward_in_eager, backend="ort_train"), whole="onnxruntime")
    with pytest.raises(NotInOnnxRuntimeError, match=r"(?s)nodes \(forward, backward\):.*halve.*register_lowering"):
        model(torch.ones(3, requires_grad=True))


def test_a_fallback_is_refused_if_all_has_to_be_in_onnx_runtime() -> None:
    compiled = torch.compile(lambda x: halve(x.sin()).cos(), backend="ort_train")
    ort_dynamo.require_compiled(compiled)(torch.ones(3))
    with pytest.raises(NotInOnnxRuntimeError) as raised:
        ort_dynamo.require_compiled(compiled, whole="onnxruntime")(torch.ones(3))
    text = str(raised.value)
    assert "1 in eager (fallback)\n  in eager (fallback):\n    1 x ort_dynamo_alone.halve.default: " in text
    assert "halve(x.sin())" in text
    assert "register_lowering" in text
    assert "placement" not in text


def test_a_model_of_fallbacks_alone_runs_in_eager() -> None:
    compiled = ort_dynamo.require_compiled(torch.compile(halve, backend="ort_train"))
    with pytest.raises(NotCompiledError, match=r"(?s)runs in eager.*1 x ort_dynamo_alone\.halve") as raised:
        compiled(torch.ones(3))
    assert not isinstance(raised.value, NotInOnnxRuntimeError)


def test_operators_in_torch_by_design_are_no_reason_to_refuse() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    ort_dynamo.require_compiled(wrapped(model), whole="onnxruntime")(torch.ones(2, 3))
    assert ort_dynamo.summary().by_design


def test_graphs_without_a_session_are_refused_if_all_has_to_be_in_onnx_runtime() -> None:
    compiled = torch.compile(lambda x: torch.rand_like(x), backend="ort_train")
    ort_dynamo.require_compiled(compiled)(torch.ones(3))
    with pytest.raises(NotInOnnxRuntimeError, match="nothing for a session to run"):
        ort_dynamo.require_compiled(compiled, whole="onnxruntime")(torch.ones(3))


def test_a_function_that_dynamo_gives_up_on_is_refused_if_all_has_to_be_in_onnx_runtime() -> None:
    with pytest.raises(NotCompiledError, match="LSTM"):
        ort_dynamo.require_compiled(wrapped(Half()), whole="onnxruntime")(torch.ones(2, 1, 3))


@pytest.mark.parametrize("whole", ["onnx", "torch", None, 1])
def test_another_value_of_whole_is_refused_at_once(whole: Any) -> None:
    message = rf"require_compiled\(\) cannot take whole={whole!r}: expected True, False or 'onnxruntime'"
    with pytest.raises(InvalidArgumentError, match=message):
        ort_dynamo.require_compiled(wrapped(Plain()), whole=whole)


def test_an_option_that_refuses_fallbacks_takes_torchs_choice() -> None:
    compiled = torch.compile(Images(), backend="ort_train", options={"fallback": "error"})
    ort_dynamo.require_compiled(compiled, whole=True)(images()).sum().backward()
    assert ort_dynamo.summary().chosen


# -- the recompile limit -------------------------------------------------------------------------------------------


def widths(count: int) -> list[nn.Module]:
    """Modules of torch.nn, each compiled and called once."""
    models = [wrapped(nn.Sequential(nn.Linear(width, 2))) for width in range(2, 2 + count)]
    for width, model in enumerate(models, start=2):
        model(torch.ones(1, width))
    return models


@pytest.mark.parametrize("earlier", [8, 10])
def test_a_model_beyond_the_recompile_limit_is_refused_with_the_setting(earlier: int) -> None:
    widths(earlier)
    model = ort_dynamo.require_compiled(wrapped(nn.Sequential(nn.Linear(20, 2))))
    with pytest.raises(NotCompiledError) as raised:
        model(torch.ones(1, 20))
    text = str(raised.value)
    assert "Sequential" in text
    assert "torch._dynamo.config.recompile_limit (8) is reached" in text
    assert "torch.compiler.reset()" in text
    assert "LSTM" not in text


def test_a_model_of_ones_own_beyond_the_limit_has_its_forward_and_line() -> None:
    for width in range(2, 12):
        model = wrapped(Wide(width))
        model(torch.ones(1, width))
    with pytest.raises(NotCompiledError, match=r"(?s)Wide: torch\._dynamo\.config\.recompile_limit"):
        ort_dynamo.require_compiled(model)(torch.ones(1, 11))
    torch.compiler.reset()
    ort_dynamo.require_compiled(model)(torch.ones(1, 11))


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_another_cause_is_not_called_an_lstm_or_a_limit() -> None:
    function = ort_dynamo.require_compiled(torch.compile(lambda x: x + 1, backend="eager"))
    with pytest.raises(NotCompiledError) as raised:
        function(torch.ones(2))
    assert "no graph was compiled by ort_train" in str(raised.value)
    assert "recompile_limit" not in str(raised.value)
    assert "LSTM" not in str(raised.value)
