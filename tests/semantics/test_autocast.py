"""Autocast and GradScaler: trained like in eager, nothing in eager, overflowing steps skipped with eager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ort_dynamo.testing import assert_like_eager, eager_reasons

HALF = [torch.bfloat16, torch.float16]


class Net(nn.Module):
    """Attention, normalisation, dropout, an MLP and a loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(q, k, v)), 0.1)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


class ConvNet(nn.Module):
    """Convolutions and batch normalisation; smooth, so that roundings do not grow from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.norm, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.silu(self.norm(self.first(x))), 2)
        x = F.silu(self.norm2(self.second(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.arange(x.shape[0]) % 4)


Case = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
"""Makes a model, which returns its loss, and the batch to call it with."""

MODELS: dict[str, Case] = {
    "transformer": lambda: (Net(), (torch.arange(24).reshape(2, 12) % 11,)),
    "convnet": lambda: (ConvNet(), (torch.linspace(-1, 1, 4 * 3 * 12 * 12).reshape(4, 3, 12, 12),)),
}


SGD = partial(torch.optim.SGD, lr=0.02)


@dataclass(frozen=True)
class Training:
    """Steps from one seed; `jitter` disturbs the initial parameters by that much, relatively."""

    make: Case
    dtype: torch.dtype
    steps: int
    optimizer: Callable[..., torch.optim.Optimizer] = SGD
    scale: float = 2.0**12
    growth_interval: int = 2000

    def run(self, compile_: bool, jitter: float = 0.0, **options: Any) -> tuple[Tensor, list[float]]:
        """Loss and loss scale of each step."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batch = self.make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + jitter * torch.randn_like(parameter))
        step = torch.compile(model, backend="ort_train", options=options, fullgraph=True) if compile_ else model
        optimizer = self.optimizer(model.parameters())
        scaler = torch.amp.GradScaler(
            "cpu", self.scale, growth_interval=self.growth_interval, enabled=self.dtype == torch.float16
        )
        torch.manual_seed(1)
        losses, scales = [], []
        for _ in range(self.steps):
            with torch.autocast("cpu", dtype=self.dtype):
                loss = step(*batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
            scales.append(scaler.get_scale())
        return torch.stack(losses), scales

    def spread(self, expected: Tensor) -> Tensor:
        """Measure the spread of eager's own curves, with weights perturbed by one and two roundings."""
        epsilon = torch.finfo(self.dtype).eps
        curves = [self.run(compile_=False, jitter=k * epsilon)[0] for k in (-2, -1, 1, 2)]
        return torch.stack([(curve - expected).abs().max() for curve in curves]).max()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", MODELS)
def test_a_loss_curve_stays_within_the_spread_of_eagers_own(name: str, dtype: torch.dtype) -> None:
    training = Training(MODELS[name], dtype, steps=30)
    expected, _ = training.run(compile_=False)
    found, _ = training.run(compile_=True)
    assert not eager_reasons()
    assert (found - expected).abs().max() <= 2 * training.spread(expected)
    assert found[-1] < found[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_two_hundred_steps_stay_within_the_spread_of_eagers_own(name: str, dtype: torch.dtype) -> None:
    """A ResNet with ReLU and max pooling is left out: it amplifies any rounding, eager's own as well."""
    workloads = pytest.importorskip("bench.workloads", reason="bench is importable under `python -m pytest` only")

    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        workload = workloads.build(name, "tiny")
        return workload.module, workload.batch

    training = Training(make, dtype, 200, partial(torch.optim.AdamW, lr=1e-3), scale=2.0**16, growth_interval=50)
    expected, expected_scales = training.run(compile_=False)
    found, scales = training.run(compile_=True)
    assert not eager_reasons()
    assert scales == expected_scales
    assert (found - expected).abs().max() <= training.spread(expected)
    assert found[-1] < found[0] / 4


def test_steps_that_overflow_are_skipped_when_eager_skips_them() -> None:
    training = Training(MODELS["transformer"], torch.float16, steps=16, scale=2.0**26, growth_interval=4)
    _, expected = training.run(compile_=False)
    _, found = training.run(compile_=True)
    assert found == expected
    rises = [after > before for before, after in pairwise(found) if after != before]
    assert rises.count(False) >= 3
    assert any(rises)


def test_the_gradient_of_a_convolution_overflows_where_its_value_does() -> None:
    """Eager's may overflow at half of that, as it adds up in float16; its GradScaler may skip a step more."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8, 6, 6).half(), torch.randn(8, 8, 3, 3).half().requires_grad_()
    cotangent = torch.randn(4, 8, 2, 2).half()

    def gradient(scale: float) -> Tensor:
        y = torch.compile(F.conv2d, backend="ort_train")(x, weight, stride=2)
        (found,) = torch.autograd.grad(y, weight, (cotangent * scale).half())
        return found

    exact = torch.nn.grad.conv2d_weight(x.double(), (8, 8, 3, 3), cotangent.double(), stride=2).abs().max().item()
    limit = torch.finfo(torch.float16).max
    below, above = gradient(0.99 * limit / exact), gradient(1.02 * limit / exact)
    assert below.isfinite().all()
    assert above.isinf().any()
    assert not above.isnan().any()


def casts(folder: Path) -> Counter[str]:
    """Casts between floating-point types in the saved models, and those of a cast's result."""
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16}
    found: Counter[str] = Counter()
    for path in folder.glob("*.onnx"):
        graph = onnx.load(path).graph
        narrowed = {n.output[0] for n in graph.node if n.op_type == "Cast" and n.attribute[0].i in floats}
        found["casts"] += len(narrowed)
        found["in a row"] += sum(n.op_type == "Cast" and n.input[0] in narrowed for n in graph.node)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_no_value_is_narrowed_to_be_widened_again_under_bfloat16(name: str, tmp_path: Path) -> None:
    training = Training(MODELS[name], torch.bfloat16, steps=1)
    training.run(compile_=True, placement="onnxruntime", save_onnx=str(tmp_path / "with"))
    training.run(compile_=True, placement="onnxruntime", save_onnx=str(tmp_path / "without"), excess_precision=False)
    found, plain = casts(tmp_path / "with"), casts(tmp_path / "without")
    assert found["in a row"] == 0
    assert plain["in a row"] > 10
    assert found["casts"] < plain["casts"] / 2


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_wholly_in_half_precision_trains(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    assert_like_eager(model.to(dtype), *(x.to(dtype) if x.is_floating_point() else x for x in batch))


def test_a_rounding_that_the_user_wrote_is_done() -> None:
    assert_like_eager(lambda x: x - x.bfloat16(), torch.randn(64), gradients=False)
    assert_like_eager(lambda x: (x * 3).half().float() - x, torch.randn(64), gradients=False)


def test_a_comparison_sees_bfloat16() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        z = x * y
        return z == z.amax()

    torch.manual_seed(0)
    assert_like_eager(function, torch.rand(256).bfloat16(), torch.rand(256).bfloat16(), gradients=False)


NORMALIZED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch": (lambda: nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)), (4, 8, 6, 6)),
    "batch of two": (lambda: nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16)), (2, 8, 1, 1)),
    "group": (lambda: nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16)), (4, 8, 6, 6)),
    "group of two": (lambda: nn.Sequential(nn.Conv2d(8, 16, 1), nn.GroupNorm(8, 16)), (4, 8, 1, 1)),
    "layer": (lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)), (32, 8)),
    "layer of two": (lambda: nn.Sequential(nn.Linear(8, 2), nn.LayerNorm(2)), (32, 8)),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_gradients_of_normalizations_are_as_exact_as_eagers(name: str) -> None:
    make, shape = NORMALIZED[name]
    errors = torch.zeros(2)
    for seed in range(4):
        torch.manual_seed(seed)
        model, x = make(), torch.randn(shape, requires_grad=True)
        cotangent = torch.randn(model(x).shape)

        def gradients(run: nn.Module, model: nn.Module = model, x: Tensor = x, cotangent: Tensor = cotangent) -> Tensor:
            y = run(x)
            wanted = [x, *(p for name, p in model.named_parameters() if name != "0.bias")]  # that one's vanishes
            found = torch.autograd.grad(y, wanted, cotangent.to(y.dtype))
            return torch.cat([g.flatten() / g.norm() for g in found])

        exact = gradients(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = gradients(torch.compile(model, backend="ort_train"))
            eager = gradients(model)
        errors += torch.stack([(ours - exact).norm(), (eager - exact).norm()])
    assert errors[0] < 1.2 * errors[1]
