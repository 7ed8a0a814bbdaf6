"""Conv nets trained over several steps: weights, buffers and every optimizer's state against eager."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from ort_dynamo.testing import Tolerance, assert_close, eager_reasons

REASON = "bench is importable under `python -m pytest` only"
CONV_NETS = pytest.importorskip("bench.conv_nets", reason=REASON).CONV_NETS
STEPS = 3
SEEDS = range(2, 300)
"""The seeds of batches, in the order in which they are tried."""
DISTANCE = 4e-6
"""The smallest distance from a jump of a gradient. Values are about one, and their rounding is smaller."""
# Three steps through norms of small batches multiply rounding: in float64 by up to some 1e8.
ROUNDING = {torch.float64: Tolerance(1e-7, 1e-9), torch.float32: Tolerance(1e-3, 1e-5)}

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "sgd, nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adamw": lambda p: torch.optim.AdamW(p),
    "asgd": lambda p: torch.optim.ASGD(p, t0=1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p),
}


class SqueezeExcite(nn.Module):
    """A block of MobileNet-v3: convolved channel by channel, weighed by its mean, narrowed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 2 * width
        self.widen = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 5, padding=2, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish()
        )
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 4, 1), nn.ReLU(), nn.Conv2d(4, wide, 1), nn.Hardsigmoid()
        )
        self.narrow = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.widen(x))
        return x + self.narrow(y * self.weigh(y))


class Classifier(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), torch.arange(len(x)))


class AutoEncoder(nn.Module):
    """A variational autoencoder: strided convolutions, a random code, transposed convolutions."""

    def __init__(self, width: int = 8, code: int = 6) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ELU(),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.1),
            nn.Flatten(), nn.Linear(2 * width * 16, 2 * code),
        )  # fmt: skip
        self.first = nn.Linear(code, 2 * width * 16)
        self.decoder = nn.Sequential(
            nn.SELU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.Hardtanh(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        made = self.decoder(self.first(code).view(len(x), -1, 4, 4))
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()
        return F.binary_cross_entropy_with_logits(made, x.sigmoid()) + 1e-2 * divergence


def mobile_net() -> nn.Module:
    blocks = [
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.Hardswish(),
        SqueezeExcite(8),
        SqueezeExcite(8),
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # its constructor, and the side of its images
    **{name: (lambda make=make: Classifier(make(True)), 32) for name, (make, _, _) in CONV_NETS.items()},
    "mobilenet v3": (lambda: Classifier(mobile_net()), 16),
    "autoencoder": (AutoEncoder, 16),
}


_aten = torch.ops.aten

KINKS: Mapping[Any, Callable[..., tuple[float, ...]]] = {
    _aten.relu.default: lambda: (0.0,),
    _aten.elu.default: lambda *scales: (0.0,),
    _aten.leaky_relu.default: lambda slope: (0.0,),
    _aten.hardtanh.default: lambda least=-1.0, most=1.0: (least, most),
    _aten.hardswish.default: lambda: (-3.0, 3.0),
    _aten.hardsigmoid.default: lambda: (-3.0, 3.0),
}
"""Operator -> the values where its gradient jumps, by the arguments after its input."""


class NearestKink(TorchDispatchMode):
    """Notes how near to a jump of a gradient the values of a run come, such as to zero before a ReLU.

    Rounding moves such a value across the jump, and then the gradients differ by far more than rounding.

    Attributes:
        distance: the smallest distance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.distance = math.inf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinks = KINKS[func](*args[1:]) if func in KINKS else ()
        found = [(args[0] - kink).abs() for kink in kinks]
        if func is _aten.max_pool2d_with_indices.default:
            found.append(self._leads(*args[:4]))
        self.distance = min([self.distance, *(one.min().item() for one in found)])
        return func(*args, **(kwargs or {}))

    def _leads(
        self, x: Tensor, size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,)
    ) -> Tensor:
        """Return how far the largest value of each window is above the second; a largest of zero is a ReLU's."""
        padded = F.pad(x, [padding[0]] * 4, value=-math.inf)
        step = (stride or size)[0]
        windows = padded.unfold(2, size[0], step).unfold(3, size[0], step).flatten(4)
        first, second = windows.topk(2).values.unbind(-1)
        return torch.where(first == 0, math.inf, first - second)


def steady_seed(name: str, optimizer: str) -> int:
    """Return the first seed of batches that no value of a training in float32 is near a kink with."""
    make, side = NETS[name]
    for seed in SEEDS:
        torch.manual_seed(0)
        net = make()
        with NearestKink() as nearest:
            train(net, net, OPTIMIZERS[optimizer]([*net.parameters()]), side, seed)
        if nearest.distance > DISTANCE:
            return seed
    raise AssertionError(f"no seed of {SEEDS} is steady")


def train(
    model: nn.Module, call: Callable[..., Tensor], optimizer: torch.optim.Optimizer, side: int, seed: int = SEEDS[0]
) -> list[Tensor]:
    """Give the losses of the steps, each of another batch."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(3, 3, side, side, dtype=dtype, generator=generator)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = call(x)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
    return losses


def assert_same(ours: Any, theirs: Any, what: str, tolerance: Tolerance) -> None:
    """Compare two state dictionaries: parameters, buffers, and the optimizer's state of each parameter."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{what}, {key}", tolerance)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{what}[{index}]", tolerance)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=tolerance.relative, abs=tolerance.absolute), what
    else:
        assert_close(ours, theirs, what, tolerance)


def compare(name: str, dtype: torch.dtype, optimizers: list[str], seed: int = SEEDS[0]) -> None:
    make, side = NETS[name]
    torch.manual_seed(0)
    start = make().to(dtype)
    ours = copy.deepcopy(start)
    compiled = torch.compile(ours, backend="ort_train", options={"fallback": "error"}, fullgraph=True)
    for optimizer in optimizers:
        theirs = copy.deepcopy(start)
        ours.load_state_dict(start.state_dict())
        ours.zero_grad()
        both = OPTIMIZERS[optimizer]([*theirs.parameters()]), OPTIMIZERS[optimizer]([*ours.parameters()])
        expected = train(theirs, theirs, both[0], side, seed)
        losses = train(ours, compiled, both[1], side, seed)
        assert_same(losses, expected, f"{optimizer}: loss", ROUNDING[dtype])
        assert_same(ours.state_dict(), theirs.state_dict(), optimizer, ROUNDING[dtype])
        assert_same(both[1].state_dict(), both[0].state_dict(), f"{optimizer}: state", ROUNDING[dtype])
    assert counters["ort_train"]["graphs"]
    assert not eager_reasons()


@pytest.mark.parametrize("name", ["resnet18", "mobilenet v3", "autoencoder"])
def test_every_optimizers_state_equals_eagers(name: str) -> None:
    # A norm after a norm has gradients that are rounding alone, by whose size Adafactor divides.
    divided = ["adafactor"] if name != "autoencoder" else []
    compare(name, torch.float64, [one for one in OPTIMIZERS if one not in divided])


@pytest.mark.parametrize("name", NETS)
def test_steps_equal_eagers(name: str) -> None:
    compare(name, torch.float64, ["adamw"])  # which makes much of the rounding of a small gradient
    compare(name, torch.float32, ["sgd, nesterov"], steady_seed(name, "sgd, nesterov"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_two_nets_that_train_against_each_other_equal_eagers(dtype: torch.dtype) -> None:
    def made() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        generator = nn.Sequential(
            nn.Linear(5, 64), nn.Unflatten(1, (4, 4, 4)), nn.ConvTranspose2d(4, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8), nn.ReLU6(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        critic = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 8, 4, 2, 1, bias=False), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(), nn.Linear(128, 1),
        )  # fmt: skip
        return generator.to(dtype), critic.to(dtype)

    def trained(compiles: bool) -> tuple[list[Tensor], Any]:
        nets = made()
        generator, critic = (torch.compile(n, backend="ort_train", fullgraph=True) if compiles else n for n in nets)
        optimizers = [torch.optim.SGD(net.parameters(), 0.05, momentum=0.5) for net in nets]
        losses = []
        torch.manual_seed(3)
        for _ in range(STEPS):
            real, code = torch.randn(4, 3, 16, 16, dtype=dtype), torch.randn(4, 5, dtype=dtype)
            fake = generator(code)
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            fooled = F.softplus(-critic(fake)).mean()
            optimizers[0].zero_grad()
            fooled.backward()
            optimizers[0].step()
            losses += [loss.detach(), fooled.detach()]
        return losses, [part.state_dict() for part in (*nets, *optimizers)]

    expected, ours = trained(False), trained(True)
    assert not eager_reasons()
    assert_same(ours, expected, "losses and states", ROUNDING[dtype])
