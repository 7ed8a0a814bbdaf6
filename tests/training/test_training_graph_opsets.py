"""Exported graphs in older opsets: valid, run by ONNX Runtime, with the numbers of the newest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from ort_dynamo.errors import InvalidArgumentError, TrainingGraphError
from ort_dynamo.training import optim
from ort_dynamo.training.training_graph import export_training_graph

Feeds = Mapping[str, npt.NDArray[Any]]
INPUTS = ("input", "labels")


class Encoder(nn.Module):
    """BERT, small: embeddings, one layer of attention with GELU and layer norms, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, words: Tensor) -> Any:
        return self.head(self.layer(self.words(words)))


class Convolutions(nn.Module):
    """ResNet, small: a stem with batch norm and pooling, one residual block, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))

    def forward(self, image: Tensor) -> Any:
        image = self.stem(image)
        return self.head(torch.relu(image + self.block(image)))


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def description(shape: list[Any], labels: list[Any], scores: list[Any]) -> dict[str, Any]:
    return {"inputs": [("input", shape), ("labels", labels)], "outputs": [("loss", [], True), ("scores", scores)]}


WORDS = torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[Tensor, Tensor]]] = {
    "encoder": (
        Encoder,
        description(["batch", "length"], ["batch", "length"], ["batch", "length", 11]),
        (WORDS, WORDS.flip(0)),
    ),
    "dense": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5)),
        description(["batch", 6], ["batch"], ["batch", 5]),
        (IMAGES[:, 0, 0, :6], torch.arange(2)),
    ),
    "embedding": (
        lambda: nn.Embedding(11, 5),
        description(["batch", 3], ["batch", 3], ["batch", 3, 5]),
        (WORDS, WORDS % 5),
    ),
    "convolutions": (Convolutions, description(["batch", 3, 8, 8], ["batch"], ["batch", 5]), (IMAGES, WORDS[:, 0] % 5)),
}


def exported(
    name: str, opset: int, part: Literal["forward", "step"], optimizer: Any = None, **options: Any
) -> onnx.ModelProto:
    """One of the models above, with the weights of seed 0, checked."""
    made, described, inputs = CASES[name]
    torch.manual_seed(0)
    model = export_training_graph(
        made().eval(),
        described,
        optimizer or optim.SGDConfig(lr=0.1),
        inputs,
        loss_fn=cross_entropy,
        part=part,
        opset_version=opset,
        **options,
    )
    onnx.checker.check_model(model, full_check=True)
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": opset}
    return model


def run(model: onnx.ModelProto, feeds: Feeds) -> dict[str, npt.NDArray[Any]]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, dict(feeds)), strict=True))


def assert_same(found: Feeds, expected: Feeds) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("name", "sizes"), [("encoder", (2, 6, 0)), ("convolutions", (2, 6))])
def test_a_forward_computes_the_same_in_older_opsets(name: str, sizes: tuple[int, ...]) -> None:
    given = {key: np.concatenate([value.numpy()] * 3) for key, value in zip(INPUTS, CASES[name][2], strict=True)}
    batches = [{key: value[:size] for key, value in given.items()} for size in sizes]
    newest = exported(name, 20, "forward")
    expected = [run(newest, feeds) for feeds in batches]
    for opset in (13, 14, 17):
        model = exported(name, opset, "forward")
        for feeds, wanted in zip(batches, expected, strict=True):
            assert_same(run(model, feeds), wanted)


def test_a_step_trains_the_same_in_opset_14() -> None:
    feeds = {key: value.numpy() for key, value in zip(INPUTS, CASES["dense"][2], strict=True)}
    adam = optim.AdamConfig(lr=0.1)
    older, newest = (exported("dense", opset, "step", adam, loss_scaling=True) for opset in (14, 20))
    state: Feeds = {}
    for _ in range(3):
        found, expected = run(older, {**feeds, **state}), run(newest, {**feeds, **state})
        assert_same(found, expected)
        assert bool(expected["all_finite"])
        state = {key.removesuffix(".updated"): found[key] for key in found if key.endswith(".updated")}
    assert found["loss"] < run(newest, feeds)["loss"]


def test_an_operator_without_a_form_in_the_opset_is_named() -> None:
    message = r"onnx cannot convert it to opset 14: ScatterElements \(.*embedding_dense_backward.*reduction='add'"
    with pytest.raises(TrainingGraphError, match=message):
        exported("embedding", 14, "step")


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (
            {"optim_config": torch.optim.SGD([torch.zeros(1)])},
            InvalidArgumentError,
            "SGDConfig, AdamConfig or Lamb",
        ),
        ({"part": "grads"}, InvalidArgumentError, "part='grads': expected one of 'forward', 'gradients', 'step'"),
        ({"opset_version": 99}, InvalidArgumentError, "opset_version=99: expected an int from 12 to "),
        ({"opset_version": 11}, InvalidArgumentError, "opset_version=11: expected an int from 12 to "),
        ({"opset_version": 13.0}, InvalidArgumentError, "opset_version=13.0: expected an int from 12 to "),
        ({"contrib_ops": "no"}, InvalidArgumentError, "contrib_ops='no': expected a bool"),
        ({"loss_fn": None}, TrainingGraphError, r"Linear.forward\(\) cannot take 2 inputs: .* give loss_fn"),
        ({"optim_config": optim.SGDConfig}, InvalidArgumentError, "SGDConfig, AdamConfig or Lamb"),
        ({"loss_fn": "mse"}, InvalidArgumentError, "loss_fn='mse': expected a function of the model's output"),
        ({"gradient_accumulation_steps": 0}, InvalidArgumentError, "expected an int >= 1"),
        ({"model_desc": {"input": []}}, ValueError, r"'input' is not known \(did you mean 'inputs'\?\)"),
        (
            {"model_desc": {"inputs": [("x", [3, 4]), ("y", [3])], "outputs": [("loss", [])]}},
            InvalidArgumentError,
            r"expected one output that is marked as the loss, such as \('loss', \[\], True\)",
        ),
        (
            {"inputs": [torch.ones(3, 4)]},
            InvalidArgumentError,
            r"inputs=\[float32\[3, 4\]\]: expected 2 tensors, for the inputs of model_desc: 'x', 'y'",
        ),
        ({"inputs": torch.ones(2, 4)}, InvalidArgumentError, r"inputs=float32\[2, 4\]: expected a list or tuple"),
        (
            {"inputs": [[1.0], torch.ones(3)]},
            InvalidArgumentError,
            r"inputs=\[list, float32\[3\]\]: expected a list or",
        ),
        (
            {"inputs": [torch.ones(3, 5), torch.ones(3)]},
            InvalidArgumentError,
            r"expected 'x' of the shape \[3, 4\], as model_desc says",
        ),
        (
            {
                "model_desc": {"inputs": [("x", ["n", 4]), ("y", ["n"])], "outputs": [("loss", [], True)]},
                "inputs": [torch.ones(3, 4), torch.ones(2)],
            },
            InvalidArgumentError,
            r"expected 'y' of the shape \['n'\] with n = 3, as model_desc says",
        ),
        ({"model": len}, InvalidArgumentError, "cannot take model=<built-in function len>: expected an nn.Module"),
        ({"model": nn.Bilinear(4, 4, 2)}, TrainingGraphError, r"Bilinear.forward\(\) cannot take 1 input: missing"),
    ],
)
def test_an_argument_that_cannot_be_is_said(wrong: dict[str, Any], error: type[Exception], said: str) -> None:
    description = {"inputs": [("x", [3, 4]), ("y", [3])], "outputs": [("loss", [], True)]}
    given: dict[str, Any] = {
        "model": nn.Linear(4, 2),
        "model_desc": description,
        "optim_config": optim.SGDConfig(lr=0.1),
        "inputs": [torch.randn(3, 4), torch.zeros(3, dtype=torch.int64)],
        "loss_fn": nn.functional.cross_entropy,
    }
    with pytest.raises(error, match=said):
        export_training_graph(**{**given, **wrong})
