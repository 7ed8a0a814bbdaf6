"""Tests of six models, in every use, against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch._dynamo.utils import counters

from ort_dynamo.testing import Tolerance, assert_close, assert_like_eager, eager_reasons

GRADIENT = Tolerance(relative=1e-4, absolute=1e-7)
VOCABULARY = 99
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


class Loss(torch.nn.Module):
    """A model and its loss, so that a call is a training step's forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        output = self.model(x)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


def tokens(batch: int = 2, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (batch, length))
    labels = ids.clone()
    labels[:, ::3] = -100
    return ids, labels


def images(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))


def bert(layers: int) -> torch.nn.Module:
    config = transformers.BertConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, **SMALL)
    return transformers.BertForMaskedLM(config)


def gpt2(layers: int) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1
    )
    config.use_cache = False
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, num_key_value_heads=2, **SMALL)
    config.use_cache = False
    return transformers.LlamaForCausalLM(config)


def vit(layers: int) -> torch.nn.Module:
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, num_labels=10, num_hidden_layers=layers, **dropout, **SMALL
    )
    return transformers.ViTForImageClassification(config)


def resnet(layers: int) -> torch.nn.Module:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, layers], num_labels=10)
    return transformers.ResNetForImageClassification(config)


def mlp(layers: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(3 * 32 * 32, 64),
        torch.nn.GELU(),
        torch.nn.Dropout(0.2),
        torch.nn.LayerNorm(64),
        torch.nn.Linear(64, 10),
    )


Make = Callable[[int], torch.nn.Module]
MODELS: dict[str, tuple[Make, Callable[..., tuple[torch.Tensor, torch.Tensor]]]] = {
    "bert": (bert, tokens),
    "gpt2": (gpt2, tokens),
    "llama": (llama, tokens),
    "vit": (vit, images),
    "resnet": (resnet, images),
    "mlp": (mlp, images),
}

every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str, layers: int = 2) -> tuple[torch.nn.Module, Callable[..., tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    return Loss(make(layers)), batch


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    mine, expected = gradients(ours), gradients(theirs)
    assert mine.keys() == expected.keys()
    for name, gradient in expected.items():
        # Gradients that are zero but for rounding (a bias before a norm, a key's bias) have nothing to compare with.
        floor = max(g.abs().max().item() for g in expected.values()) * 1e-6
        assert_close(mine[name], gradient, f"gradient of {name}", Tolerance(GRADIENT.relative, floor), strides=False)


def native() -> None:
    counts = counters["ort_train"]
    assert counts["native_nodes"] + counts["chosen_nodes"] > 0
    assert not eager_reasons()


@every_model
def test_a_training_step_equals_eager(name: str) -> None:
    model, batch = build(name)
    ours = copy.deepcopy(model)
    x, labels = batch()
    compiled = torch.compile(ours, backend="ort_train", options={"fallback": "error"}, fullgraph=True)
    for subject, run in ((model, model), (ours, compiled)):
        torch.manual_seed(1)
        loss = run(x, labels)
        loss.backward()
        subject.loss = loss.detach()
    assert_close(ours.loss, model.loss, "the loss", GRADIENT)
    assert_same_gradients(ours, model)
    for (name, mine), expected in zip(ours.named_buffers(), model.buffers(), strict=True):
        assert_close(mine, expected, f"buffer {name}", GRADIENT)
    native()


@every_model
def test_evaluation_and_no_grad_equal_eager(name: str) -> None:
    model, batch = build(name)
    with torch.no_grad():
        assert_like_eager(model, *batch(), gradients=False, tolerance=GRADIENT)  # statistics and dropout, no graph
        assert_like_eager(model.eval(), *batch(), gradients=False, tolerance=GRADIENT)
    native()


@every_model
def test_training_with_accumulation_batches_of_two_sizes_and_a_frozen_half(name: str) -> None:
    theirs, batch = build(name)
    parameters = list(theirs.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)
    ours = copy.deepcopy(theirs)
    compiled = torch.compile(ours, backend="ort_train", options={"fallback": "error"})
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.05, momentum=0.9) for m in (theirs, ours)
    ]
    for step in range(3):
        for part in range(2):
            x, labels = batch(2 + part)
            for run in (theirs, compiled):
                torch.manual_seed(step)
                (run(x, labels) / 2).backward()
        assert_same_gradients(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    native()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_conv_net_in_channels_last_equals_eager(dynamic: bool) -> None:
    model, batch = build("resnet", layers=1)
    model = model.to(memory_format=torch.channels_last)
    x, labels = batch()
    ours = copy.deepcopy(model)
    compiled = torch.compile(ours, backend="ort_train", options={"fallback": "error"}, dynamic=dynamic)
    for run in (model, compiled):
        run(x.to(memory_format=torch.channels_last), labels).backward()
    assert_same_gradients(ours, model)
    native()


@every_model
def test_symbolic_batches_compile_once(name: str) -> None:
    theirs, batch = build(name, layers=1)
    theirs.eval()  # only shapes matter here, not dropout
    ours = copy.deepcopy(theirs)
    compiled: Any = torch.compile(ours, backend="ort_train", options={"fallback": "error"}, dynamic=True)
    graphs = 0
    for size in (2, 3, 5):
        x, labels = batch(size)
        for run in (theirs, compiled):
            run(x, labels).backward()
        graphs = graphs or counters["ort_train"]["graphs"]
    assert counters["ort_train"]["graphs"] == graphs
    assert_same_gradients(ours, theirs)
    native()


@pytest.mark.parametrize("autocast", [False, True])
@every_model
def test_saved_files_pass_the_full_checker(name: str, autocast: bool, tmp_path: Path) -> None:
    model, batch = build(name, layers=1)
    options = {"save_onnx": tmp_path, "placement": "onnxruntime", "debug": {"verify": True}}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = torch.compile(model, backend="ort_train", options=options)(*batch())
    loss.backward()
    files = [*tmp_path.rglob("*.onnx")]
    assert len(files) >= 4  # forward and backward, as lowered and as rewritten
    for file in files:
        onnx.checker.check_model(file, full_check=True)
