"""Tests of models that train in one graph: masked attention, recurrent layers, and models that keep results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from row_trainers import CONFIGS, FIXED_ROWS, ROWS, WIDTH, plain_losses, rows, squares
from small_trainers import make_options
from torch import Tensor, nn

import ort_dynamo
from ort_dynamo import ORTTrainer, export_training_graph


def causal(x: Tensor) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(x.shape[0])


def last_is_padding(x: Tensor) -> Tensor:
    return (torch.arange(x.shape[0]) == x.shape[0] - 1).expand(x.shape[1], -1)


def not_after(x: Tensor) -> Tensor:
    return torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)


def encoder_layer(dropout: float = 0.1) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout)


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(encoder_layer(), 1, enable_nested_tensor=False)


def decoder() -> nn.TransformerDecoder:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.1), 1)


class Masked(nn.Module):
    """A transformer of torch's, called with masks."""

    def __init__(self, layers: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = layers
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layers, x).mean(-1)


MASKED: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: Masked(encoder(), lambda layers, x: layers(x, causal(x))),
    "encoder, mask and padding": lambda: Masked(
        encoder(), lambda layers, x: layers(x, mask=not_after(x), src_key_padding_mask=last_is_padding(x))
    ),
    "encoder, no causal mask": lambda: Masked(encoder(), lambda layers, x: layers(x, causal(x) * 0 + 0.5, None, None)),
    "encoder that is told": lambda: Masked(encoder(), lambda layers, x: layers(x, causal(x), is_causal=True)),
    "layer, mask and padding": lambda: Masked(
        encoder_layer(), lambda layers, x: layers(x, not_after(x), last_is_padding(x))
    ),
    "decoder": lambda: Masked(
        decoder(), lambda layers, x: layers(x, x * 0.5, tgt_mask=causal(x), memory_mask=causal(x))
    ),
    "decoder by position": lambda: Masked(
        decoder(), lambda layers, x: layers(x, x * 0.5, causal(x), None, None, None, None)
    ),
    "transformer": lambda: Masked(
        nn.Transformer(WIDTH, 2, 1, 1, 16, 0.1),
        lambda layers, x: layers(x, x * 0.5, src_mask=causal(x), tgt_mask=causal(x)),
    ),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize(
    "kind", [one if one in ("encoder", "decoder") else pytest.param(one, marks=pytest.mark.slow) for one in MASKED]
)
def test_a_transformer_with_a_mask_trains_in_one_graph_as_in_eager(kind: str) -> None:
    model = MASKED[kind]()
    data = [rows(seed=seed) for seed in range(2)]
    torch.manual_seed(4)
    expected = plain_losses(copy.deepcopy(model), 0.1, data)
    trainer = ORTTrainer(model, FIXED_ROWS, CONFIGS["sgd"](), squares, make_options())
    torch.manual_seed(4)
    found = [float(trainer.train_step(*batch)[0]) for batch in data]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert trainer._running is not None
    assert trainer._running.in_one_session


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("kind", ["encoder", *(pytest.param(one, marks=pytest.mark.slow) for one in list(MASKED)[1:])])
def test_a_training_graph_of_a_transformer_with_a_mask_is_written(kind: str) -> None:
    model = MASKED[kind]()
    made = export_training_graph(model, ROWS, CONFIGS["lamb"](), rows(), loss_fn=squares)
    onnx.checker.check_model(made, full_check=True)
    assert not any(module._forward_pre_hooks for module in model.modules())


class WordModel(nn.Module):
    """The language model of the old trainer's samples, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(28, WIDTH)
        self.register_buffer("positions", torch.randn(35, 1, WIDTH))
        self.drop = nn.Dropout(0.2)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.2), 1)
        self.decoder = nn.Linear(WIDTH, 28)
        self.mask: Tensor | None = None

    def forward(self, data: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) != len(data):
            mask = (torch.triu(torch.ones(len(data), len(data))) == 1).transpose(0, 1)
            self.mask = mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)
        rows = self.drop(self.words(data) * WIDTH**0.5 + self.positions[: data.size(0)])
        return self.decoder(self.layers(rows, self.mask))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("config", ["lamb", *(pytest.param(one, marks=pytest.mark.slow) for one in ("sgd", "adam"))])
def test_graphs_of_the_samples_language_model_are_written(config: str, tmp_path: Path) -> None:
    description = {
        "inputs": [("data", [9, 4]), ("target", [36])],
        "outputs": [("loss", [], True), ("predictions", [9, 4, 28])],
    }
    paths = {
        "model_after_graph_transforms_path": tmp_path / "transformed.onnx",
        "model_with_gradient_graph_path": tmp_path / "gradients.onnx",
        "model_with_training_graph_path": tmp_path / "training.onnx",
        "model_with_training_graph_after_optimization_path": tmp_path / "optimized.onnx",
    }
    if config == "lamb":
        paths = {"model_with_training_graph_path": paths["model_with_training_graph_path"]}
    options = make_options(debug={"graph_save_paths": {name: str(path) for name, path in paths.items()}})
    model = WordModel()

    def loss_fn(x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x.view(-1, 28), target)

    trainer = ORTTrainer(model, description, CONFIGS[config](), loss_fn, options)
    words = torch.randint(28, (9, 4))
    plain = copy.deepcopy(model)
    torch.manual_seed(4)
    expected = loss_fn(plain(words), words.flatten()).item()
    losses = []
    for _ in range(3):
        torch.manual_seed(4)
        losses.append(float(trainer.train_step(words, words.flatten())[0]))
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert trainer._running is not None
    assert torch.equal(trainer._running.combined.model.mask, plain.mask)
    assert all(path.exists() for path in paths.values())
    for path in paths.values():
        if path.name != "optimized.onnx":  # that one has operators of ONNX Runtime's own
            onnx.checker.check_model(onnx.load(path))


class Keeping(nn.Module):
    """Keeps results from call to call, in an attribute, a list and a buffer that it assigns, and counts its calls."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(()))
        self.kept: list[Tensor] = []
        self.last: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.5 * self.mean + x.mean()
        self.last = x * 2
        self.kept.append(x.mean())
        return self.layer(x).squeeze(-1) + self.mean


@pytest.mark.parametrize("part", ["forward", "step"])
def test_a_capture_changes_nothing_that_a_model_keeps(part: Any) -> None:
    model = Keeping()
    buffer = model.mean
    export_training_graph(model, FIXED_ROWS, CONFIGS["sgd"](), rows(), loss_fn=squares, part=part)
    assert model.mean is buffer
    assert float(buffer) == 0
    assert (model.kept, model.last, model.calls) == ([], None, 0)
    assert model.training


@pytest.mark.parametrize("part", ["gradients", "step"])
def test_a_training_graph_of_a_transposed_weight_runs(part: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Flatten(0))
    model[0].weight = nn.Parameter(torch.randn(WIDTH, 4).t())
    x, y = torch.randn(3, WIDTH), torch.randn(12)
    description = {"inputs": [("x", [3, WIDTH]), ("y", [12])], "outputs": [("loss", [], True), ("found", [12])]}
    made = export_training_graph(model, description, CONFIGS["sgd"](), [x, y], loss_fn=squares, part=part)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    name = {"gradients": "0.weight.grad", "step": "0.weight.updated"}[part]
    (found,) = session.run([name], {"x": x.numpy(), "y": y.numpy()})
    squares(model(x), y).backward()
    weight, gradient = model[0].weight.detach(), model[0].weight.grad
    assert gradient is not None
    expected = gradient if part == "gradients" else weight - session_rate(made) * gradient
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


def session_rate(made: onnx.ModelProto) -> float:
    """The learning rate that a training graph begins with."""
    (rate,) = (one for one in made.graph.initializer if one.name == "learning_rate")
    return float(onnx.numpy_helper.to_array(rate))


class Recurrent(nn.Module):
    """Layers of which each gives a sequence."""

    def __init__(self, *layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x.mean(-1)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: Recurrent(nn.GRU(WIDTH, 4, 2, dropout=0.3)),
    "lstm": lambda: Recurrent(nn.LSTM(WIDTH, 4, 2, dropout=0.3)),
    "rnn": lambda: Recurrent(nn.RNN(WIDTH, 4, bidirectional=True), nn.RNN(8, 3, nonlinearity="relu")),
}


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("one_session", [True, False])
def test_recurrent_layers_train_in_sessions_as_in_eager(kind: str, one_session: bool) -> None:
    model = RECURRENT[kind]()
    data = [rows(seed=seed) for seed in range(2)]
    torch.manual_seed(4)
    expected = plain_losses(copy.deepcopy(model), 0.1, data)
    trainer = ORTTrainer(model, ROWS, CONFIGS["sgd"](), squares, make_options())
    trainer._run(list(data[0]))._one_session = one_session
    torch.manual_seed(4)
    np.testing.assert_allclose([float(trainer.train_step(*batch)[0]) for batch in data], expected, rtol=1e-5)
    trainer.eval_step(*data[0])
    assert trainer._running is not None
    assert trainer._running.in_one_session is one_session
    seen = ort_dynamo.summary()
    assert not [note for note in (*seen.skipped, *seen.breaks) if "RNN" in str(note)]


@pytest.mark.parametrize("kind", RECURRENT)
def test_training_graphs_of_recurrent_layers_are_written(kind: str) -> None:
    made = export_training_graph(RECURRENT[kind](), ROWS, CONFIGS["adam"](), rows(3), loss_fn=squares)
    onnx.checker.check_model(made, full_check=True)
