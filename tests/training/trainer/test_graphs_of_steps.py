"""Tests of models that train in one graph, in a forward and a backward graph, or not at all."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from small_trainers import make_options
from torch import Tensor, nn

import ort_dynamo
from ort_dynamo import ORTTrainer, amp, export_training_graph, optim

CONFIGS: dict[str, Any] = {
    "sgd": lambda: optim.SGDConfig(lr=0.1),
    "adam": lambda: optim.AdamConfig(lr=0.01),
    "lamb": lambda: optim.LambConfig(lr=0.01),
}
WIDTH = 8
ROWS: dict[str, Any] = {
    "inputs": [("x", ["length", "batch", WIDTH]), ("target", ["length", "batch"])],
    "outputs": [("loss", [], True), ("predictions", ["length", "batch"])],
}
FIXED_ROWS: dict[str, Any] = {
    "inputs": [("x", [5, 3, WIDTH]), ("target", [5, 3])],
    "outputs": [("loss", [], True), ("predictions", [5, 3])],
}


def squares(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square().mean()


def rows(length: int = 5, batch: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, batch, WIDTH, generator=generator), torch.randn(length, batch, generator=generator)


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


def plain_losses(model: nn.Module, lr: float, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The losses of SGD in torch."""
    losses = []
    for x, target in data:
        loss = squares(model(x), target)
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for one, gradient in zip(model.parameters(), gradients, strict=True):
            if gradient is not None:
                one.data -= lr * gradient
        losses.append(loss.item())
    return losses


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


class Branching(nn.Module):
    """Asks for numbers: no trace can take it as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.positive = nn.Linear(WIDTH, 1)
        self.other = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.positive if bool(x.sum() > 0) else self.other
        return layer(self.drop(x)).squeeze(-1)


class AsksSymbol(Branching):
    """Puts a number that a trace does not know into an operator's arguments."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(x).transpose(0, 1).unsqueeze(1)
        is_causal = bool((x > 1e9).all())
        y = nn.functional.scaled_dot_product_attention(y, y, y, is_causal=is_causal)
        return self.positive(y.squeeze(1).transpose(0, 1)).squeeze(-1)


class Disabled(Branching):
    """Calls a function that is disabled for Dynamo."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.compiler.disable(self.positive)(self.drop(x)).squeeze(-1)


@pytest.mark.parametrize("kind", [Branching, AsksSymbol, Disabled])
@pytest.mark.parametrize("config", ["sgd", "lamb"])
def test_the_reason_for_several_graphs_is_warned_of_once(kind: type[Branching], config: str) -> None:
    model = kind()
    data = [rows(seed=seed) for seed in range(3)]
    torch.manual_seed(4)
    expected = plain_losses(copy.deepcopy(model), 0.1, data)
    trainer = ORTTrainer(model, ROWS, CONFIGS[config](), squares, make_options())
    torch.manual_seed(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [float(trainer.train_step(*batch)[0]) for batch in data]
    (said,) = [str(one.message) for one in caught if "cannot be one graph" in str(one.message)]
    assert [one.filename for one in caught if "cannot be one graph" in str(one.message)] == [__file__]
    line = kind.forward.__code__.co_firstlineno
    places = [f"{Path(__file__).name}:{number}" for number in range(line, line + 6)]
    assert "run apart: " in said
    assert any(place in said for place in places)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)  # the generator advanced as far as in eager
    if config == "sgd":
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_exporting_a_step_of_several_graphs_is_refused() -> None:
    for kind in (Branching, AsksSymbol):
        with pytest.raises(ort_dynamo.errors.TrainingGraphError, match="one graph"):
            export_training_graph(kind(), ROWS, CONFIGS["sgd"](), rows(), loss_fn=squares)


def test_an_error_of_the_programs_is_raised_and_the_next_step_is_one_graph() -> None:
    trainer = ORTTrainer(
        nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(-2)), ROWS, CONFIGS["sgd"](), squares, make_options()
    )
    x, target = rows()
    with pytest.raises(RuntimeError):
        trainer.train_step(x[..., :-1], target)
    trainer.train_step(x.view(3, 5, WIDTH), target.view(3, 5))
    assert trainer._running is not None
    assert trainer._running.in_one_session


def test_gradients_gathered_over_branches_are_all_applied() -> None:
    model = Branching()
    model.drop.p = 0.0
    inputs = [torch.ones(1, 1, WIDTH), -torch.ones(1, 1, WIDTH)]
    target = torch.zeros(1, 1)
    options = make_options(batch={"gradient_accumulation_steps": 2})
    trainer = ORTTrainer(model, ROWS, CONFIGS["sgd"](), squares, options)
    with pytest.warns(UserWarning, match="cannot be one graph"):
        trainer.train_step(inputs[0], target)
    trainer.train_step(inputs[1], target)
    loss = sum(squares(model(x), target) for x in inputs) / 2
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    found = trainer.state_dict(pytorch_format=True)
    for (name, before), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(found[name], before.detach() - 0.1 * gradient)


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


LOSS: dict[str, Any] = {"inputs": [("x", ["batch", WIDTH])], "outputs": [("loss", [], True)]}


class Nothing(nn.Module):
    """Has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Counting(nn.Module):
    """Has a buffer alone, which it counts up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.mean() + self.calls


class OneLayer(nn.Module):
    """A layer, of which subclasses make a loss without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean()


class Frozen(OneLayer):
    """Has frozen parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Unread(OneLayer):
    """Computes its loss without its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Detached(OneLayer):
    """Computes its loss without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean().detach()


class Counted(OneLayer):
    """Gives a loss of integers."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) > 0).sum()


@pytest.mark.parametrize("kind", [Nothing, Counting, Frozen, Unread, Detached, Counted])
@pytest.mark.parametrize(
    ("config", "levels"),
    [
        ("sgd", {}),
        ("lamb", {}),
        ("adam", {"batch": {"gradient_accumulation_steps": 2}}),
        ("lamb", {"mixed_precision": {"enabled": True, "loss_scaler": amp.DynamicLossScaler()}}),
    ],
    ids=["sgd", "lamb", "gathered", "scaled"],
)
def test_a_model_without_trainable_weights_gives_its_loss_and_warns(
    kind: type[nn.Module], config: str, levels: dict[str, Any]
) -> None:
    model = kind()
    plain = copy.deepcopy(model)
    trainer = ORTTrainer(model, LOSS, CONFIGS[config](), options=make_options(**levels))
    x = torch.ones(2, WIDTH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [float(trainer.train_step(x)) for _ in range(3)]
    (said,) = [str(one.message) for one in caught]
    assert "trains nothing" in said
    np.testing.assert_allclose(found, [float(plain(x)) for _ in range(3)], rtol=2e-3)
    trained = trainer.state_dict(pytorch_format=True)
    assert trained.keys() == plain.state_dict().keys()
    for name, one in plain.state_dict().items():
        assert torch.equal(trained[name], one)
    trainer.load_state_dict(trainer.state_dict())
    trainer.eval_step(x)


@pytest.mark.parametrize("kind", [Nothing, Frozen, Unread, Detached])
def test_the_training_graph_of_a_model_without_trainable_weights_is_refused(kind: type[nn.Module]) -> None:
    forward = export_training_graph(kind(), LOSS, CONFIGS["sgd"](), [torch.ones(2, WIDTH)], part="forward")
    onnx.checker.check_model(forward, full_check=True)
    with pytest.raises(ort_dynamo.errors.TrainingGraphError, match="does not depend on any trainable weight"):
        export_training_graph(kind(), LOSS, CONFIGS["sgd"](), [torch.ones(2, WIDTH)])
