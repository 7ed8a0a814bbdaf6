"""Conv nets that the benchmarks train, each with one fixed batch: common architectures of torch's users.

Written out in plain torch: wheels of torchvision fit one build of torch only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.workloads import Size, Workload

__all__ = ["CONV_NETS", "build_conv_net", "whole_convnext", "whole_resnet50", "whole_unet"]


def _norm_conv(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after))


class _Residual(nn.Module):
    """A residual block of ResNet: basic, or with a bottleneck of a quarter of the channels."""

    def __init__(self, before: int, after: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        inside = after // 4 if bottleneck else after
        parts = [_norm_conv(before, inside, 3, stride), _norm_conv(inside, after, 3)]
        if bottleneck:
            parts = [_norm_conv(before, inside, 1), _norm_conv(inside, inside, 3, stride), _norm_conv(inside, after, 1)]
        self.parts = nn.ModuleList(parts)
        self.beside = _norm_conv(before, after, 1, stride) if stride != 1 or before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for part in self.parts[:-1]:
            y = functional.relu(part(y))
        return functional.relu(self.parts[-1](y) + self.beside(x))


def _resnet(width: int, depths: tuple[int, ...], bottleneck: bool) -> nn.Module:
    stem = [_norm_conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before, blocks = width, list[nn.Module]()
    for stage, depth in enumerate(depths):
        after = width * 2**stage * (4 if bottleneck else 1)
        for index in range(depth):
            blocks.append(_Residual(before, after, 2 if stage and not index else 1, bottleneck))
            before = after
    return nn.Sequential(*stem, *blocks, *_head(before))


def _head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _CLASSES)]


class _Inverted(nn.Module):
    """A block of MobileNet-v2: widened, convolved channel by channel, narrowed."""

    def __init__(self, before: int, after: int, stride: int, factor: int) -> None:
        super().__init__()
        wide = before * factor
        widened = [_norm_conv(before, wide, 1), nn.ReLU6()] if factor != 1 else []
        self.body = nn.Sequential(
            *widened, _norm_conv(wide, wide, 3, stride, groups=wide), nn.ReLU6(), _norm_conv(wide, after, 1)
        )
        self.adds = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


def _mobilenet(rows: tuple[tuple[int, int, int, int], ...]) -> nn.Module:
    blocks: list[nn.Module] = [_norm_conv(3, 32, 3, 2), nn.ReLU6()]
    before = 32
    for factor, after, depth, stride in rows:
        for index in range(depth):
            blocks.append(_Inverted(before, after, 1 if index else stride, factor))
            before = after
    return nn.Sequential(*blocks, *_head(before))


class _UNet(nn.Module):
    """A U-Net of two levels: each upsampled map is concatenated with the encoder's map of its size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [self._pair(3, width), self._pair(width, 2 * width), self._pair(2 * width, 4 * width)]
        )
        self.lift = nn.ModuleList([nn.ConvTranspose2d(k * width, k * width // 2, 2, 2) for k in (4, 2)])
        self.up = nn.ModuleList([self._pair(k * width, k * width // 2) for k in (4, 2)])
        self.last = nn.Conv2d(width, _CLASSES, 1)

    @staticmethod
    def _pair(before: int, after: int) -> nn.Module:
        return nn.Sequential(_norm_conv(before, after, 3), nn.ReLU(), _norm_conv(after, after, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](functional.max_pool2d(first, 2))
        y = self.down[2](functional.max_pool2d(second, 2))
        for lift, up, beside in zip(self.lift, self.up, (second, first), strict=True):
            y = up(torch.cat([lift(y), beside], 1))
        logits: Tensor = self.last(y).mean((2, 3))
        return logits


class _ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.inside = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(self.depthwise(x).permute(0, 2, 3, 1)) * self.scale
        return x + y.permute(0, 3, 1, 2)


def _convnext(width: int, depths: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4)]
    for stage, depth in enumerate(depths):
        if stage:
            layers.append(nn.Conv2d(width, 2 * width, 2, 2))
            width *= 2
        layers += [_ConvNextBlock(width) for _ in range(depth)]
    return nn.Sequential(*layers, *_head(width))


_ROWS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
_CLASSES = 100

CONV_NETS: dict[str, tuple[Callable[[bool], nn.Module], int, int]] = {
    "resnet18": (lambda tiny: _resnet(8 if tiny else 64, (1, 1) if tiny else (2, 2, 2, 2), False), 16, 96),
    "resnet50": (lambda tiny: _resnet(8 if tiny else 32, (1, 1) if tiny else (2, 2, 2, 2), True), 8, 128),
    "mobilenet": (lambda tiny: _mobilenet(_ROWS[:2] if tiny else _ROWS), 8, 128),
    "unet": (lambda tiny: _UNet(8 if tiny else 32), 4, 64),
    "convnext": (lambda tiny: _convnext(16 if tiny else 48, (1, 1) if tiny else (2, 2, 4, 2)), 8, 128),
}
"""name -> function that builds it, rows of its batch, side of its images."""


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, targets: Tensor, images: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(images), targets)


def build_conv_net(name: str, size: Size, seed: int = 0) -> Workload:
    """A net of CONV_NETS with its batch; equal seeds give equal weights and batches."""
    torch.manual_seed(seed)
    make, rows, side = CONV_NETS[name]
    rows, side = (2, 32) if size == "tiny" else (rows * (2 if size == "medium" else 1), side)
    return Workload(_Loss(make(size == "tiny")), (torch.randint(_CLASSES, (rows,)), torch.randn(rows, 3, side, side)))


def whole_resnet50(rows: int = 64, side: int = 224) -> Workload:
    """ResNet-50 with its own depths and widths."""
    batch = torch.randint(_CLASSES, (rows,)), torch.randn(rows, 3, side, side)
    return Workload(_Loss(_resnet(64, (3, 4, 6, 3), True)), batch)


def whole_convnext(rows: int = 64, side: int = 224) -> Workload:
    """ConvNeXt-T, without its stochastic depth and the norms between its stages."""
    batch = torch.randint(_CLASSES, (rows,)), torch.randn(rows, 3, side, side)
    return Workload(_Loss(_convnext(96, (3, 3, 9, 3))), batch)


def whole_unet(rows: int = 16, side: int = 256) -> Workload:
    """The UNet of three levels with 64 channels on the first."""
    batch = torch.randint(_CLASSES, (rows,)), torch.randn(rows, 3, side, side)
    return Workload(_Loss(_UNet(64)), batch)
