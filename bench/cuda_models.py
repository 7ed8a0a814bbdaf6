"""The models of `bench.cuda`, in plain torch: the machine with the device may have no other package.

Weights are float32, as autocast wants them; equal seeds give equal weights and batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.conv_nets import CONV_NETS, build_conv_net, whole_convnext, whole_resnet50, whole_unet
from bench.workloads import Workload

__all__ = ["COUNTED", "LARGE", "SMALL", "Scale", "build_model"]

Scale = Literal["tiny", "full"]
"""tiny: shows on a CPU that it runs. full: as the device is to be measured."""


@dataclass(frozen=True)
class _Text:
    layers: int
    width: int
    heads: int
    rows: int
    length: int
    vocabulary: int


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.inward(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.outward(mixed.transpose(1, 2).reshape(rows, length, width))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.attention = _Attention(width, heads, causal)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.dropout, self.causal = nn.Dropout(dropout), causal

    def forward(self, x: Tensor) -> Tensor:
        if self.causal:  # normalised before, as in GPT; else after, as in BERT
            x = x + self.dropout(self.attention(self.norms[0](x)))
            return x + self.dropout(self.inner(self.norms[1](x)))
        x = self.norms[0](x + self.dropout(self.attention(x)))
        return self.norms[1](x + self.dropout(self.inner(x)))


class _LanguageModel(nn.Module):
    """The mean cross-entropy of the next token, or of masked ones; targets of -100 do not count."""

    def __init__(self, text: _Text, causal: bool, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(text.vocabulary, text.width)
        self.places = nn.Parameter(torch.randn(text.length, text.width) * 0.02)
        self.layers = nn.ModuleList([_Layer(text.width, text.heads, causal, dropout) for _ in range(text.layers)])
        self.norm, self.head = nn.LayerNorm(text.width), nn.Linear(text.width, text.vocabulary)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, targets: Tensor, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _text(sizes: dict[Scale, _Text], causal: bool, dropout: float, scale: Scale) -> Workload:
    text = sizes[scale]
    ids = torch.randint(text.vocabulary, (text.rows, text.length))
    if causal:
        targets = functional.pad(ids[:, 1:], (0, 1), value=-100)
    else:
        masked = torch.rand(ids.shape) < 0.15
        masked[:, 0] = True
        targets = ids.where(masked, -100)
    return Workload(_LanguageModel(text, causal, dropout), (targets, ids))


_TINY = _Text(layers=2, width=32, heads=2, rows=2, length=16, vocabulary=64)
_GPT: dict[Scale, _Text] = {"tiny": _TINY, "full": _Text(24, 1024, 16, 8, 1024, 50304)}
_BERT: dict[Scale, _Text] = {"tiny": _TINY, "full": _Text(24, 1024, 16, 16, 512, 30592)}
_SMALL: dict[Scale, _Text] = {"tiny": _TINY, "full": _Text(4, 256, 4, 8, 128, 4096)}


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class _GatedLayer(nn.Module):
    """A layer of Llama: RMS norms, rotary positions, SwiGLU, no bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, inner = heads, 8 * width // 3 // 16 * 16
        self.query, self.key, self.value, self.outward = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        rows, length, width = x.shape
        normed = self.norms[0](x)
        query, key, value = (
            one(normed).view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.outward(mixed.transpose(1, 2).reshape(rows, length, width))
        normed = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class _Llama(nn.Module):
    def __init__(self, text: _Text) -> None:
        super().__init__()
        self.tokens = nn.Embedding(text.vocabulary, text.width)
        self.layers = nn.ModuleList([_GatedLayer(text.width, text.heads) for _ in range(text.layers)])
        self.norm, self.head = nn.RMSNorm(text.width), nn.Linear(text.width, text.vocabulary, bias=False)
        size = text.width // text.heads
        angles = torch.arange(text.length)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cosine", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sine", torch.cat([angles, angles], -1).sin(), persistent=False)

    def forward(self, targets: Tensor, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def _llama(scale: Scale) -> Workload:
    text = _GPT[scale]
    ids = torch.randint(text.vocabulary, (text.rows, text.length))
    return Workload(_Llama(text), (functional.pad(ids[:, 1:], (0, 1), value=-100), ids))


class _ViT(nn.Module):
    def __init__(self, text: _Text, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, text.width, patch, patch)
        self.places = nn.Parameter(torch.randn(text.length, text.width) * 0.02)
        self.layers = nn.ModuleList([_Layer(text.width, text.heads, False, 0.0) for _ in range(text.layers)])
        self.norm, self.head = nn.LayerNorm(text.width), nn.Linear(text.width, text.vocabulary)
        for layer in self.layers:
            layer.causal = True  # its norms come first
            layer.attention.causal = False

    def forward(self, targets: Tensor, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x).mean(1)), targets)


def _vit(scale: Scale) -> Workload:
    text, side, patch = (_TINY, 16, 4) if scale == "tiny" else (_Text(24, 1024, 16, 42, 196, 1000), 224, 16)
    return Workload(
        _ViT(text, patch), (torch.randint(text.vocabulary, (text.rows,)), torch.randn(text.rows, 3, side, side))
    )


def _whole(name: str, whole: Callable[[], Workload], scale: Scale) -> Workload:
    return build_conv_net(name, "tiny") if scale == "tiny" else whole()


class _Residual(nn.Module):
    """Two convolutions, each behind a group norm and a SiLU; the embedded time is added between them."""

    def __init__(self, before: int, after: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(before // 4, before), nn.GroupNorm(after // 4, after)])
        self.first, self.second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.time, self.shortcut = nn.Linear(time, after), nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(functional.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        return self.shortcut(x) + self.second(functional.silu(self.norms[1](y)))


class _Denoiser(nn.Module):
    """A UNet as diffusion models have it, which predicts the noise of an image."""

    def __init__(self, widths: tuple[int, ...], time: int) -> None:
        super().__init__()
        self.inward = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = [*pairwise(widths)]
        self.down = nn.ModuleList([_Residual(before, after, time) for before, after in pairs])
        self.middle = _Residual(widths[-1], widths[-1], time)
        self.up = nn.ModuleList([_Residual(2 * after, before, time) for before, after in reversed(pairs)])
        self.norm, self.outward = nn.GroupNorm(widths[0] // 4, widths[0]), nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, noise: Tensor, images: Tensor, time: Tensor) -> Tensor:
        x, left = self.inward(images + noise), []
        for layer in self.down:
            x = layer(x, time)
            left.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for layer in self.up:
            x = layer(torch.cat([functional.interpolate(x, scale_factor=2.0), left.pop()], 1), time)
        return functional.mse_loss(self.outward(functional.silu(self.norm(x))), noise)


def _denoiser(scale: Scale) -> Workload:
    widths, time, rows, side = ((8, 8, 16), 8, 2, 16) if scale == "tiny" else ((128, 128, 256, 256), 512, 32, 64)
    noise, images = torch.randn(2, rows, 3, side, side)
    return Workload(_Denoiser(widths, time), (noise, images, torch.randn(rows, time)))


class _Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)
        )

    def forward(self, targets: Tensor, x: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers(x), targets)


def _mlp(scale: Scale) -> Workload:
    width, rows = (32, 8) if scale == "tiny" else (1024, 256)
    return Workload(_Perceptron(width), (torch.randint(10, (rows,)), torch.randn(rows, 64)))


def _net(name: str, scale: Scale) -> Workload:
    return build_conv_net(name, "tiny" if scale == "tiny" else "small")


SMALL: dict[str, Callable[[Scale], Workload]] = {
    "mlp": _mlp,
    "gpt": partial(_text, _SMALL, True, 0.0),
    "bert": partial(_text, _SMALL, False, 0.1),
    **{name: partial(_net, name) for name in CONV_NETS},
}
"""Models for checks of correctness and for the fixed cost of a call."""

LARGE: dict[str, Callable[[Scale], Workload]] = {
    "gpt, 24 layers": partial(_text, _GPT, True, 0.0),
    "bert, 24 layers": partial(_text, _BERT, False, 0.1),
    "resnet50, 224²": partial(_whole, "resnet50", whole_resnet50),
}
"""Models that are measured."""

COUNTED: dict[str, Callable[[Scale], Workload]] = {
    "llama, 24 layers": _llama,
    "vit, 24 layers": _vit,
    "convnext, 224²": partial(_whole, "convnext", whole_convnext),
    "unet, 256²": partial(_whole, "unet", whole_unet),
    "denoiser, 64²": _denoiser,
}
"""Models that `cuda_floor.py` counts beside these, without a device."""


def build_model(name: str, scale: Scale, device: torch.device, *, dropout: bool = True, seed: int = 0) -> Workload:
    """A workload of SMALL, LARGE or COUNTED on a device; without `dropout` equal inputs give equal results."""
    torch.manual_seed(seed)
    made = {**SMALL, **LARGE, **COUNTED}[name](scale)
    if not dropout:
        for module in made.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return Workload(made.module.to(device), tuple(tensor.to(device) for tensor in made.batch))
