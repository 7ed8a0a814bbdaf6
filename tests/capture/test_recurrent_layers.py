"""Recurrent layers are traced with eager's dropout; traces in other threads stay torch's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher

from ort_dynamo.capture.recurrent_layers import recurrent_layers

KINDS = {
    "lstm": lambda **settings: nn.LSTM(4, 6, 3, **settings),
    "gru": lambda **settings: nn.GRU(4, 6, 3, **settings),
    "rnn of tanh": lambda **settings: nn.RNN(4, 6, 3, **settings),
    "rnn of relu": lambda **settings: nn.RNN(4, 6, 3, nonlinearity="relu", **settings),
}


def padded(layer: nn.Module) -> Tensor:
    return layer(torch.ones(5, 3, 4))[0]  # type: ignore[no-any-return]


def packed(layer: nn.Module) -> Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(torch.ones(5, 3, 4), torch.tensor([5, 4, 2]))
    return layer(rows)[0].data  # type: ignore[no-any-return]


def seeded(function: Callable[[nn.Module], Tensor], layer: nn.Module) -> Tensor:
    torch.manual_seed(3)
    return function(layer)


def by_formulas(function: Callable[[nn.Module], Tensor], layer: nn.Module) -> Tensor:
    """Run `function` with the kernels that a trace reaches."""
    with enable_python_dispatcher():
        return seeded(function, layer)


@pytest.mark.parametrize("function", [padded, packed])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_is_eagers_in_the_context(kind: str, function: Callable[[nn.Module], Tensor]) -> None:
    layer = KINDS[kind](dropout=0.5, bidirectional=True)
    expected = seeded(function, layer)
    with recurrent_layers():
        torch.testing.assert_close(by_formulas(function, layer), expected)
    layer.eval()
    without = seeded(function, layer)
    with recurrent_layers():
        torch.testing.assert_close(by_formulas(function, layer), without)
    assert not torch.allclose(expected, without)


@pytest.mark.parametrize("function", [padded, packed])
@pytest.mark.parametrize("kind", KINDS)
def test_another_thread_has_torchs_own_formulas(kind: str, function: Callable[[nn.Module], Tensor]) -> None:
    layer = KINDS[kind](dropout=0.5)
    alone = by_formulas(function, layer)
    with ThreadPoolExecutor(1) as other, recurrent_layers():
        torch.testing.assert_close(other.submit(by_formulas, function, layer).result(), alone, rtol=0, atol=0)
    torch.testing.assert_close(by_formulas(function, layer), alone, rtol=0, atol=0)


def test_contexts_nest_and_an_error_closes_them() -> None:
    layer = nn.GRU(4, 6, 2, dropout=0.5)
    expected = seeded(padded, layer)
    with recurrent_layers():
        with pytest.raises(ZeroDivisionError), recurrent_layers():
            raise ZeroDivisionError
        torch.testing.assert_close(by_formulas(padded, layer), expected)
