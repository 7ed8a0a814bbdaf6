"""A model that is not compiled is an error at its first call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from traced_containers import dynamo_traces_its_own_containers

import ort_dynamo
from ort_dynamo.errors import NotCompiledError


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
def test_what_is_not_compiled_at_all_is_refused_at_once(model: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotCompiledError, match=r"torch\.compile was not called on it"):
        ort_dynamo.require_compiled(model)


def test_an_error_of_the_call_is_its_own() -> None:
    model = ort_dynamo.require_compiled(wrapped(Plain()))
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(1, 4))
    assert not isinstance(raised.value, NotCompiledError)
    model(torch.ones(1, 3))
