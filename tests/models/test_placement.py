"""Tests of nodes that torch runs by choice: conv nets equal eager on any thread count, and reports name them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import ort_dynamo
from ort_dynamo.report.record import RECORDS
from ort_dynamo.runtime.installed.providers import usable_target
from ort_dynamo.targets.target import Target
from ort_dynamo.testing import Tolerance, assert_close, assert_like_eager


class Block(nn.Module):
    def __init__(self, width: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        out = width * stride
        self.first = nn.Conv2d(width, out, 3, stride, 1, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 1)
        self.beside = nn.Conv2d(width, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.second(F.relu(self.norm(self.first(x)))) + self.beside(x))


class Upwards(nn.Module):
    """A part of a U-Net: pooled, transposed back, and joined."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.gelu(self.down(F.max_pool2d(x, 2)))
        return self.last(torch.cat([self.up(inside), x], 1))


def net(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *middle,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.LazyLinear(10),
    )  # fmt: skip


NETS = {
    "residual": lambda: net(Block(8), Block(8, 2)),
    "depthwise": lambda: net(Block(8, groups=8)),
    "upwards": lambda: net(Upwards(8)),
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def images(rows: int = 4) -> Tensor:
    return torch.randn(rows, 3, 32, 32)


def trained(model: nn.Module, run: Any, *batches: Tensor) -> dict[str, Tensor]:
    """The results of steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = {}
    for index, batch in enumerate(batches):
        torch.manual_seed(index)
        optimizer.zero_grad()
        result = run(batch)
        F.cross_entropy(result, torch.arange(len(batch)) % 10).backward()
        optimizer.step()
        found[f"result {index}"] = result.detach()
    return {**found, **{name: value.clone() for name, value in model.state_dict().items()}}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_training_equals_eager(name: str, channels_last: bool, placement: str, threads: int) -> None:
    theirs = NETS[name]()
    batches = [images() for _ in range(3)]
    theirs(batches[0])  # the lazy layer
    if channels_last:
        theirs = theirs.to(memory_format=torch.channels_last)
        batches = [batch.to(memory_format=torch.channels_last) for batch in batches]
    ours = copy.deepcopy(theirs)
    options = {"fallback": "error", "placement": placement}
    compiled = torch.compile(ours, backend="ort_train", options=options, fullgraph=True)
    expected, actual = trained(theirs, theirs, *batches), trained(ours, compiled, *batches)
    for what, value in expected.items():
        assert_close(actual[what], value, what, Tolerance(2e-4, 2e-5))
    for (what, mine), (_, wanted) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert mine.grad is not None
        assert_close(mine.grad, wanted.grad, f"gradient of {what}", Tolerance(2e-4, 2e-5), strides=not channels_last)
    counts = counters["ort_train"]
    assert (counts["chosen_nodes"] > 0) == (placement == "fastest")
    assert counts["eager_nodes"] == 0


def test_a_symbolic_batch_compiles_once(threads: int) -> None:
    theirs = NETS["residual"]()
    theirs(images())
    ours = copy.deepcopy(theirs)
    compiled = torch.compile(ours, backend="ort_train", dynamic=True)
    batches = [images(rows) for rows in (4, 3, 7)]
    expected, actual = trained(theirs, theirs, *batches), trained(ours, compiled, *batches)
    for what, value in expected.items():
        assert_close(actual[what], value, what, Tolerance(2e-4, 2e-5))
    assert len(RECORDS) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_convolutions_equal_eager(dtype: torch.dtype, threads: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8)).to(dtype)
    assert_like_eager(model, images().to(dtype).requires_grad_())
    assert counters["ort_train"]["chosen_nodes"]


def test_inference_equals_eager(threads: int) -> None:
    model = NETS["residual"]()
    model(images())
    assert_like_eager(model.eval().requires_grad_(False), images(), gradients=False)
    assert counters["ort_train"]["chosen_nodes"]


def test_results_and_gradients_have_eagers_strides(threads: int) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = F.conv2d(x, w, padding=1)
        return y.relu(), y.transpose(1, 3)

    assert_like_eager(
        function, torch.randn(2, 8, 16, 16, requires_grad=True), torch.randn(8, 8, 3, 3, requires_grad=True)
    )


def test_checkpoints_save_no_copy_of_recomputed_tensors() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv2d(channels, 8, 3) for channels in (3, 8, 8))

        def inside(self, x: Tensor) -> Tensor:
            for layer in self.layers[1:]:
                x = layer(x).flip(1)  # which no layout follows: the next layer reads a copy
            return x

        def forward(self, x: Tensor, checkpoints: bool) -> Tensor:
            x = self.layers[0](x)
            return checkpoint(self.inside, x, use_reentrant=False) if checkpoints else self.inside(x)

    model, x = Checkpointed(), images()
    compiled = torch.compile(model, backend="ort_train", fullgraph=True)
    gradients = []
    for checkpoints in (False, True):
        model.zero_grad()
        compiled(x, checkpoints).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for mine, plain in zip(*gradients, strict=True):
        assert_close(mine, plain, "a gradient", Tolerance(2e-4, 2e-5))
    without, within = (record.partition.memory.nbytes for record in RECORDS if record.partition is not None)
    assert within < without


def test_the_choice_is_counted_with_its_reason_and_shown() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    torch.compile(model, backend="ort_train", options={"fallback": "error"})(images()).sum().backward()
    reasons = counters["ort_train_chosen"]
    assert {reason.split(":")[0] for reason in reasons} >= {"aten.convolution.default"}
    assert reasons.total() == counters["ort_train"]["chosen_nodes"] == ort_dynamo.summary().chosen.total()
    text = str(ort_dynamo.summary())
    assert f"{reasons.total()} in torch by choice (placement), 0 in eager (fallback)" in text
    assert "in torch by choice (placement):\n" in text


def test_saved_models_are_whole_if_that_is_asked_for(tmp_path: Path) -> None:
    torch.compile(
        nn.Conv2d(3, 4, 3), backend="ort_train", options={"placement": "onnxruntime", "save_onnx": str(tmp_path)}
    )(images()).sum().backward()
    (record,) = RECORDS
    assert [(len(graph.islands), graph.chosen.total()) for graph in record.graphs] == [(1, 0), (1, 0)]


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(Exception, match="'placement' cannot be 'torch': expected one of 'fastest', 'onnxruntime'"):
        torch.compile(nn.ReLU(), backend="ort_train", options={"placement": "torch"})(images())


# -- single operators ----------------------------------------------------------------------------------------------

SIDE = 64
SINGLE: dict[str, Callable[..., Tensor]] = {
    "lgamma": lambda x, i: x.square().lgamma(),
    "remainder": lambda x, i: x % 0.7,
    "atan2": lambda x, i: torch.atan2(x, x.flip(-1) + 3),
    "cumprod": lambda x, i: (x.tanh() / 8 + 1).cumprod(-1),
    "cummax": lambda x, i: x.cummax(-1).values,
    "prod": lambda x, i: (x.tanh() / 8 + 1).prod(-1),
    "gather": lambda x, i: x.gather(-1, i),
    "scatter_add": lambda x, i: x.scatter_add(-1, i, x.t()),
    "index_select": lambda x, i: x.index_select(0, i[0]),
    "index_put": lambda x, i: x.index_put((i[0],), x.t(), accumulate=True),
    "embedding": lambda x, i: F.embedding(i[:4], x),
    "embedding_bag": lambda x, i: F.embedding_bag(i[0], x, i[1, :1] * 0),
    "embedding_bag max": lambda x, i: F.embedding_bag(i[:4], x, mode="max"),
    "grid_sample": lambda x, i: F.grid_sample(x[None, None], x[None, :, None, :2].tanh(), align_corners=False),
    "adaptive_max_pool2d": lambda x, i: F.adaptive_max_pool2d(x[None], 4),
    "frexp": lambda x, i: torch.frexp(x)[0],
}


@pytest.fixture
def free_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries are free here, since the graphs of tests are too small to pay for one."""
    price_cuts(monkeypatch, 0)


def price_cuts(monkeypatch: pytest.MonkeyPatch, cut: float) -> None:
    """Set the price of a cut in nanoseconds; below 0, torch runs operators that gain nothing, too."""
    prices = usable_target("cpu").prices
    assert prices.operators is not None
    operators = replace(prices.operators, cut=cut, crossing=0, spinning=0)
    monkeypatch.setattr(Target, "prices", replace(prices, operators=operators))


@pytest.mark.usefixtures("free_cuts")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
@pytest.mark.parametrize("name", SINGLE)
def test_slower_operators_equal_eager(name: str, placement: str, dynamic: bool) -> None:
    def function(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        y = SINGLE[name](x.t().sin(), index)
        return y, y.cos()

    x, index = torch.randn(SIDE, SIDE, requires_grad=True), torch.randint(SIDE, (SIDE, SIDE))
    options = {"fallback": "error", "placement": placement}
    assert_like_eager(function, x, index, options=options, dynamic=dynamic)
    counts = counters["ort_train"]
    assert (counts["chosen_nodes"] > 0) == (placement == "fastest")
    assert counts["eager_nodes"] == 0
    assert counts["native_nodes"] > 0
    assert counters["ort_train_chosen"].total() == counts["chosen_nodes"]


def test_a_cut_that_costs_more_than_it_gains_is_not_made() -> None:
    function = SINGLE["lgamma"]
    x, index = torch.randn(SIDE // 16, SIDE, requires_grad=True), torch.randint(SIDE, (SIDE, SIDE))
    assert_like_eager(function, x, index)
    assert not counters["ort_train"]["chosen_nodes"]


@pytest.mark.usefixtures("free_cuts")
def test_the_gradient_of_a_resize_equals_eager() -> None:
    # With symbolic sizes torch takes it apart.
    x = torch.randn(1, 2, SIDE, SIDE, requires_grad=True)
    assert_like_eager(lambda x: F.interpolate(x.sin(), scale_factor=2.0).cos(), x, dynamic=False)
    assert [reason.split(":")[0] for reason in counters["ort_train_chosen"]] == [
        "aten.upsample_nearest2d_backward.default"
    ]


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet", "vit"])
def test_architectures_that_are_cut_for_every_choice_equal_eager(
    name: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workloads = pytest.importorskip("bench.workloads", reason="bench is importable under `python -m pytest` only")
    price_cuts(monkeypatch, -1)
    workload = workloads.build(name, "tiny")
    options = {"fallback": "error"}
    assert_like_eager(workload.module, *workload.batch, options=options, tolerance=Tolerance(1e-4, 1e-5))
    assert counters["ort_train"]["chosen_nodes"]
    assert counters["ort_train"]["native_nodes"] or name == "resnet"
