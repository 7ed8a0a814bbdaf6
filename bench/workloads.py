"""The models that the benchmarks train, each with one fixed batch, at three sizes.

transformers' own model classes with random weights, so nothing is downloaded; the loss is computed here from the
logits, one formula for all. Dropout stays at each model's own default: on in BERT, GPT-2 and the MLP, absent from
Llama, ViT and ResNet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["DEEP", "LARGE", "SIZES", "WORKLOADS", "Size", "Workload", "build"]

Size = Literal["tiny", "small", "medium", "deep", "large"]

SIZES: tuple[Size, ...] = ("tiny", "small", "medium")
"""tiny: only shows that it runs. small: an eager step of 50 to 300 ms on two cores. medium: about ten times that."""

DEEP = ("bert", "gpt2", "resnet")
"""Workloads that have the size "deep", too: 12 layers, or 4 stages of 4 blocks, with more activations than weights."""

LARGE = ("bert", "gpt2", "llama", "vit")
"""Workloads that have the size "large", too: 768 wide, and an eager step takes one to three seconds on one core."""


@dataclass(frozen=True)
class Workload:
    """A model and the batch it is trained on.

    Attributes:
        module: called as `module(*batch)`, it returns the loss, a scalar that requires a gradient.
        batch: tensors without gradients.
    """

    module: nn.Module
    batch: tuple[Tensor, ...]


def _mlp(size: Size) -> Workload:
    width = {"tiny": 32, "small": 1536, "medium": 3072}[size]
    rows = {"tiny": 8, "small": 256, "medium": 512}[size]
    features, classes = 784, 10
    module = nn.Sequential(
        nn.Linear(features, width),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(width, classes),
    )
    return Workload(_CrossEntropy(module), (torch.randint(classes, (rows,)), torch.randn(rows, features)))


def _bert(size: Size) -> Workload:
    """Masked language modelling, the batch padded to its longest row."""
    from transformers import BertConfig, BertForMaskedLM

    text = _TEXT[size]
    config = BertConfig(
        vocab_size=text.vocabulary,
        hidden_size=text.width,
        num_hidden_layers=text.layers,
        num_attention_heads=text.heads,
        intermediate_size=4 * text.width,
        max_position_embeddings=text.length,
    )
    ids = text.draw()
    mask = torch.ones_like(ids)
    mask[1::2, -text.length // 4 :] = 0
    masked = torch.rand(ids.shape) < 0.15
    masked[:, 0] = True  # a batch with nothing to predict would have no loss
    targets = ids.where(masked & mask.bool(), -100)
    return Workload(_CrossEntropy(BertForMaskedLM(config), attention_mask=True), (targets, ids, mask))


def _gpt2(size: Size) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    text = _TEXT[size]
    config = GPT2Config(
        vocab_size=text.vocabulary,
        n_embd=text.width,
        n_layer=text.layers,
        n_head=text.heads,
        n_positions=text.length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    ids = text.draw()
    return Workload(_CrossEntropy(GPT2LMHeadModel(config)), (_next_token(ids), ids))


def _llama(size: Size) -> Workload:
    """Two query heads to each key-value head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    text = _TEXT[size]
    config = LlamaConfig(
        vocab_size=text.vocabulary,
        hidden_size=text.width,
        num_hidden_layers=text.layers,
        num_attention_heads=text.heads,
        num_key_value_heads=text.heads // 2,
        intermediate_size=8 * text.width // 3 // 8 * 8,
        max_position_embeddings=text.length,
        use_cache=False,
    )
    ids = text.draw()
    return Workload(_CrossEntropy(LlamaForCausalLM(config)), (_next_token(ids), ids))


def _vit(size: Size) -> Workload:
    from transformers import ViTConfig, ViTForImageClassification

    width, layers = {"tiny": (32, 1), "small": (192, 6), "medium": (384, 8), "large": (768, 4)}[size]
    rows, side, patch = {"tiny": (2, 16, 8), "small": (8, 64, 8), "medium": (8, 96, 8), "large": (4, 224, 16)}[size]
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // (64 if size == "large" else 32),
        intermediate_size=4 * width,
        image_size=side,
        patch_size=patch,
        num_labels=_IMAGE_CLASSES,
    )
    return Workload(_CrossEntropy(ViTForImageClassification(config)), _images(rows, side))


def _resnet(size: Size) -> Workload:
    """Basic blocks as in ResNet-18, with batch normalisation in training mode."""
    from transformers import ResNetConfig, ResNetForImageClassification

    width, depth = {"tiny": (8, 1), "small": (32, 2), "medium": (64, 2), "deep": (16, 4)}[size]
    rows, side = {"tiny": (2, 32), "small": (8, 128), "medium": (16, 160), "deep": (16, 128)}[size]
    config = ResNetConfig(
        embedding_size=width,
        hidden_sizes=[width, 2 * width, 4 * width, 8 * width],
        depths=[depth] * 4,
        layer_type="basic",
        num_labels=_IMAGE_CLASSES,
    )
    return Workload(_CrossEntropy(ResNetForImageClassification(config)), _images(rows, side))


WORKLOADS: dict[str, Callable[[Size], Workload]] = {
    "mlp": _mlp,
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "vit": _vit,
    "resnet": _resnet,
}
"""name -> builder, which makes random weights and a random batch by torch's generator."""


def build(name: str, size: Size, seed: int = 0) -> Workload:
    """A workload of WORKLOADS; equal seeds give equal weights and batches."""
    torch.manual_seed(seed)
    return WORKLOADS[name](size)


_IMAGE_CLASSES = 100


class _CrossEntropy(nn.Module):
    """The mean cross-entropy of a model's logits; targets of -100 do not count."""

    def __init__(self, model: nn.Module, attention_mask: bool = False) -> None:
        super().__init__()
        self.model = model
        self.has_mask = attention_mask

    def forward(self, targets: Tensor, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        outputs: Any = self.model(inputs, attention_mask=mask) if self.has_mask else self.model(inputs)
        logits: Tensor = getattr(outputs, "logits", outputs)
        return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class _Text:
    """The shape that the three language models share."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    rows: int
    length: int

    def draw(self) -> Tensor:
        return torch.randint(self.vocabulary, (self.rows, self.length))


_TEXT: dict[Size, _Text] = {
    "tiny": _Text(vocabulary=64, width=32, layers=1, heads=2, rows=2, length=16),
    "small": _Text(vocabulary=4096, width=256, layers=4, heads=4, rows=4, length=128),
    "medium": _Text(vocabulary=8192, width=512, layers=6, heads=8, rows=4, length=256),
    "deep": _Text(vocabulary=512, width=256, layers=12, heads=4, rows=4, length=256),
    "large": _Text(vocabulary=8192, width=768, layers=2, heads=12, rows=2, length=512),
}


def _next_token(ids: Tensor) -> Tensor:
    """Targets of causal language modelling: each token's successor, nothing for the last."""
    return nn.functional.pad(ids[:, 1:], (0, 1), value=-100)


def _images(rows: int, side: int) -> tuple[Tensor, ...]:
    return torch.randint(_IMAGE_CLASSES, (rows,)), torch.randn(rows, 3, side, side)
