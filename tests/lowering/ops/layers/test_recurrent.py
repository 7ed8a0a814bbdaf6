"""Recurrent cells and layers."""

import pytest
import torch
from torch import nn

from ort_dynamo.testing import TOLERANCES, assert_like_eager


@pytest.fixture
def captured_layers():
    """Dynamo leaves whole recurrent layers to eager unless it is told not to."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


@pytest.mark.parametrize(
    "cell", [nn.RNNCell(4, 6), nn.RNNCell(4, 6, nonlinearity="relu"), nn.GRUCell(4, 6, bias=False)]
)
def test_cells_equal_eager(cell):
    assert_like_eager(cell, torch.randn(3, 4, requires_grad=True), torch.randn(3, 6, requires_grad=True))


def test_an_lstm_cell_equals_eager():
    state = (torch.randn(3, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True))
    assert_like_eager(nn.LSTMCell(4, 6), torch.randn(3, 4, requires_grad=True), state)


@pytest.mark.usefixtures("captured_layers")
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_layers_that_train_equal_eager(kind):
    assert_like_eager(kind(4, 6, bidirectional=True, batch_first=True), torch.randn(3, 2, 4, requires_grad=True))


@pytest.mark.usefixtures("captured_layers")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    "settings", [{}, {"num_layers": 2, "dropout": 0.5}, {"proj_size": 3, "bidirectional": True}, {"bias": False}]
)
def test_an_lstm_over_data_trains(settings):
    layer = nn.LSTM(4, 6, **settings)
    x = torch.randn(5, 3, 4)  # needs no gradient: torch would take oneDNN's operator
    torch.manual_seed(1)
    expected = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
    torch.manual_seed(1)
    compiled = torch.compile(layer, backend="ort_train", options={"fallback": "error"}, fullgraph=True)
    actual = torch.autograd.grad(compiled(x)[0].square().sum(), list(layer.parameters()))
    torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("captured_layers")
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_lstm_that_does_not_train_equals_eager(dynamic):
    layer = nn.LSTM(4, 6, bidirectional=True).requires_grad_(False)
    plain = nn.LSTM(12, 6, bias=False).requires_grad_(False)
    assert_like_eager(lambda x: plain(layer(x)[0]), torch.randn(5, 3, 4), gradients=False, dynamic=dynamic)


def test_packed_sequences_equal_eager():
    layer, x, lengths = nn.GRU(4, 6), torch.randn(5, 3, 4), torch.tensor([5, 4, 2])

    def function(x):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
        return nn.utils.rnn.pad_packed_sequence(layer(packed)[0])[0] * 2

    torch.testing.assert_close(torch.compile(function, backend="ort_train")(x), function(x))


LAYERS = {
    "lstm": (nn.LSTM, {"bidirectional": True}),
    "lstm with projections": (nn.LSTM, {"proj_size": 3, "batch_first": True}),
    "gru": (nn.GRU, {"batch_first": True, "bias": False}),
    "gru of both directions": (nn.GRU, {"bidirectional": True}),
    "rnn of tanh": (nn.RNN, {"num_layers": 3}),
    "rnn of relu": (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
}


@pytest.mark.usefixtures("captured_layers")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dropout", [0.5, 1.0])
@pytest.mark.parametrize(("kind", "settings"), LAYERS.values(), ids=LAYERS)
def test_dropout_between_layers_equals_eager(kind, settings, dropout):
    layer = kind(4, 6, **{"num_layers": 2, "dropout": dropout, **settings})
    compiled = torch.compile(layer, backend="ort_train", fullgraph=True)
    x = torch.randn(3, 5, 4)

    def run(function):
        torch.manual_seed(1)
        out, _ = function(x)
        gradients = torch.autograd.grad(out.square().sum(), list(layer.parameters()), allow_unused=True)
        return out, gradients, torch.rand(2)  # the generator advances as far as in eager

    torch.testing.assert_close(run(compiled), run(layer), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("captured_layers")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_layers_follows_the_mode(kind):
    layer = kind(4, 6, num_layers=2, dropout=0.5).requires_grad_(False)
    compiled = torch.compile(layer, backend="ort_train", fullgraph=True)
    x = torch.randn(5, 3, 4)

    def run(function):
        torch.manual_seed(1)
        return function(x)[0]

    expected = run(layer)
    torch.testing.assert_close(run(compiled), expected)
    layer.eval()
    torch.testing.assert_close(run(compiled), run(layer))
    assert not torch.allclose(run(layer), expected)


@pytest.mark.usefixtures("captured_layers")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("settings", [{"bidirectional": True, "num_layers": 2, "dropout": 0.5}, {"proj_size": 3}])
def test_an_lstm_under_autocast_equals_eager(settings, onednn, trains):
    layer = nn.LSTM(4, 6, **settings)

    def function(x):
        with torch.set_grad_enabled(trains), torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    x = torch.randn(5, 3, 4, requires_grad=True)
    with torch.backends.mkldnn.flags(enabled=onednn):
        assert_like_eager(function, x, gradients=trains, tolerance=TOLERANCES[torch.bfloat16])
