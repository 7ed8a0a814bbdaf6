"""CUDA's forms, run on the CPU's kernels: training steps of models, and operators of PyTorch's database, against eager.

These tests check the forms' arithmetic, not CUDA's kernels.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cuda_forms as cuda_forms_module
import onnx
import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from cuda_forms import NoKernelError, cuda_forms, cuda_target, widened
from cuda_target import autocast, bound_dtypes, kernels_lacking
from operators_on_cuda import NAMES
from opinfo_samples import DTYPES, check_sample, operators, samples_of
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils._pytree import tree_map

from bench.workloads import WORKLOADS, build
from ort_dynamo.passes.fx.torch_graph import place_whole_kernels
from ort_dynamo.passes.fx.torch_graph.permute_images import PermuteImages
from ort_dynamo.runtime.installed.providers import find_target
from ort_dynamo.testing import TOLERANCES, Tolerance, assert_close, eager_reasons

pytestmark = pytest.mark.default_placement

FLOATS = ("float32", "bfloat16", "float16")

PLACES = ("fastest", "onnxruntime", "whole kernels", "fused kernels")
"""By CUDA's prices; all in sessions; each normalization and attention in torch, at any size; and by CUDA's
prices, with fused kernels between products."""


@contextmanager
def placed(place: str) -> Iterator[dict[str, str]]:
    """Give the options of one of PLACES, and have its prices."""
    with pytest.MonkeyPatch.context() as patch:
        if place == "whole kernels":
            patch.setattr(place_whole_kernels, "saved", lambda *_: float("inf"))
        yield {"placement": "onnxruntime" if place == "onnxruntime" else "fastest"}


def trained(
    run: Callable[..., Tensor], module: nn.Module, batch: Any, dtype: torch.dtype = torch.float32, steps: int = 2
) -> dict[str, Tensor]:
    """The loss and the gradients of each step, and the buffers and parameters after the last one."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=1e-3), {}
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with autocast(dtype):  # anew, since it keeps the casts of parameters
            loss = run(*batch)
        loss.backward()
        found[f"loss {step}"] = loss.detach().clone()
        gradients = [p.grad.flatten().double() for p in module.parameters() if p.grad is not None]
        found[f"gradients {step}"] = torch.cat(gradients)
        optimizer.step()
    found |= {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    return found | {f"parameter {name}": p.detach().clone() for name, p in module.named_parameters()}


def of_more_images(batch: Any) -> Any:
    """A batch with eight times the rows: a norm over two numbers leaves nothing of a half type's gradients."""
    torch.manual_seed(0)
    rows = tree_map(lambda x: torch.cat([x] * 8), batch)
    return tree_map(lambda x: x + torch.randn_like(x) if x.is_floating_point() else x, rows)


def doubled(batch: Any) -> Any:
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)


def assert_as_near(
    ours: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Compare with eager; where rounding decides, by eager's own distance from the same steps in float64."""
    limit = Tolerance(1e-4, 1e-6) if dtype == torch.float32 else TOLERANCES[torch.float16]
    for what, value in eager.items():
        error, own = ((one.double() - exact[what].double()).norm() for one in (ours[what], value))
        if error > 1.5 * own:
            assert_close(ours[what], value, what, limit)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("place", PLACES)
def test_a_model_trains_as_in_eager(place: str, name: str, dtype: str) -> None:
    workload = build(name, "tiny")
    batch = of_more_images(workload.batch) if name == "resnet" and dtype != "float32" else workload.batch
    subject, ours = (copy.deepcopy(workload.module) for _ in range(2))
    of = getattr(torch, dtype)
    steps = 1 if name == "resnet" else 2  # which normalizes over two numbers: rounding decides its second step
    eager = trained(subject, subject, batch, of, steps)
    exact = copy.deepcopy(workload.module).double()
    right = trained(exact, exact, doubled(batch), steps=steps)
    with placed(place) as options, cuda_forms(fused=place == "fused kernels") as found:
        run = torch.compile(ours, backend="ort_train", options=options, fullgraph=True)
        assert_as_near(trained(run, ours, batch, of, steps), eager, right, of)
    assert not found.lacking
    # With all in sessions, flash attention stays in eager: its gradient reads the state of the generator.
    assert all("flash_attention" in reason for reason in eager_reasons())
    assert counters["ort_train"]["native_nodes"] + counters["ort_train"]["chosen_nodes"] > 0
    if place == "onnxruntime":
        assert found.operators.total() > 30
    assert bool(found.kernels) == (place == "fused kernels" and bool(found.operators))


def of_rows(batch: Any, count: int) -> Any:
    """A batch of so many rows, each other than the rest; their number is a symbol to the next compile."""

    def changed(x: Tensor) -> Tensor:
        rows = torch.cat([x] * count)[:count]
        rows = rows + torch.randn_like(rows) if x.is_floating_point() else rows.roll(1, -1)
        torch._dynamo.mark_dynamic(rows, 0)
        return rows

    return tree_map(changed, batch)


class NormsOfImages(nn.Module):
    """Group and instance norms between convolutions: sums for each image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = ((3, 8), (8, 8), (8, 4))
        self.convolutions = nn.ModuleList([nn.Conv2d(before, after, 3, padding=1) for before, after in sizes])
        self.norms = nn.ModuleList([nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True)])

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=False):
            x = F.silu(norm(convolution(x)))
        return self.convolutions[-1](x).to(torch.promote_types(x.dtype, torch.float32)).square().mean()


def with_batch(name: str) -> tuple[nn.Module, Any]:
    if name == "norms of images":
        return NormsOfImages(), (torch.randn(2, 3, 12, 20),)
    workload = build(name, "tiny")
    return workload.module, workload.batch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet", "vit", "norms of images"])
def test_one_graph_of_fused_kernels_trains_on_batches_of_several_sizes(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    permuted: list[bool] = []
    call = PermuteImages.call

    def noted(self: PermuteImages, gm: GraphModule) -> PassResult:
        permuted.append((result := call(self, gm)).modified)
        return result

    monkeypatch.setattr(PermuteImages, "call", noted)
    (module, one_batch), of = with_batch(name), getattr(torch, dtype)
    subject, ours, exact = (copy.deepcopy(module) for _ in range(3))
    exact.double()
    with cuda_forms(fused=True) as found:
        run = torch.compile(ours, backend="ort_train", fullgraph=True)
        for count in (6, 11, 4):
            batch = of_rows(one_batch, count)
            eager = trained(subject, subject, batch, of, 1)
            right = trained(exact, exact, doubled(batch), steps=1)
            with torch.compiler.set_stance("default" if count == 6 else "fail_on_recompile"):
                assert_as_near(trained(run, ours, batch, of, 1), eager, right, of)
            for one in (subject, ours):
                one.load_state_dict(exact.state_dict())
    assert found.kernels
    assert not found.lacking
    assert not found.left_to_cpu
    assert any(permuted) == (name not in ("gpt2", "llama"))


def layers() -> dict[str, nn.Module]:
    return {
        "conv": nn.Conv2d(3, 6, 3),
        "strided": nn.Conv2d(6, 8, 3, 2, 1, groups=2),
        "transposed": nn.ConvTranspose2d(8, 4, 2, 2),
        "batch": nn.BatchNorm2d(4),
        "instance": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        "group": nn.GroupNorm(2, 4),
        "layer": nn.LayerNorm(8),
    }


class Net(nn.Module):
    """Convolutions, each normalization, and attention of a half type as a whole, without autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict(layers())

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.layers.items():
            x = F.silu(layer(x)) if name != "layer" else layer(x[..., :8, :8])
        rows = x.flatten(2).unflatten(2, (8, 8))
        y = F.scaled_dot_product_attention(rows, rows, rows) if rows.requires_grad else rows
        return y.to(torch.promote_types(y.dtype, torch.float32)).square().mean()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", PLACES)
def test_a_net_of_a_half_type_trains_as_in_eager(place: str, dtype: str) -> None:
    of = getattr(torch, dtype)
    x = torch.randn(4, 3, 20, 20)
    exact, subject, ours = Net().double(), Net().to(of), Net().to(of)
    eager = trained(subject, subject, (x.to(of),))
    right = trained(exact, exact, (x.to(of).double(),))
    with placed(place) as options, cuda_forms(fused=place == "fused kernels") as found:
        run = torch.compile(ours, backend="ort_train", options=options, fullgraph=True)
        assert_as_near(trained(run, ours, (x.to(of),)), eager, right, of)
    assert not found.lacking


@pytest.mark.parametrize(
    ("norm", "images"),
    [(nn.BatchNorm2d(6), 2), (nn.GroupNorm(6, 6), 4)],
    ids=["two images", "one channel"],
)
def test_the_gradient_of_a_norm_of_one_or_two_elements_vanishes_as_in_eager(norm: nn.Module, images: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.GELU(), norm)
    inputs, factors = torch.randn(images, 1, 6, 6) * 3 + 5, torch.randn(images, 6, 1, 1)

    def gradient(run: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        x = inputs.to(dtype).requires_grad_()
        with autocast(torch.bfloat16 if dtype == torch.float32 else torch.float32):
            y = run(x)
        (y.to(dtype) * factors.to(dtype)).sum().backward()
        assert x.grad is not None
        return x.grad.double()

    right = gradient(copy.deepcopy(model).double(), torch.float64)
    with cuda_forms(fused=True):
        found = gradient(torch.compile(model, backend="ort_train"), torch.float32)
    assert_close(found, right, "gradient", Tolerance(0, 3e-3))


# -- operators ---------------------------------------------------------------------------------------------------------


def of_cuda(names: Sequence[str]) -> list[str]:
    """Without attention of the CPU, which CUDA's stands in for: that pads the log-sum-exp."""
    return [name for name in names if not name.endswith("_for_cpu")]


def check(name: str, dtype: str, *, which: int | None = None, fused: bool = False) -> None:
    op, of = operators()[name], DTYPES[dtype]
    samples = samples_of(op, of, 3)
    if not samples:
        pytest.skip(f"torch has no kernel of {dtype} on the CPU")
    for sample in samples if which is None else samples[len(samples) // 2 :][:1]:
        with cuda_forms(fused=fused) as found:
            verdict = check_sample(op, sample, of, dynamic=False, in_place=False)
        assert not found.lacking, "the CPU has kernels for all of this database"
        assert verdict.kind not in ("different", "failed"), verdict.detail


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", of_cuda(NAMES[::10]))
def test_an_operator_gives_eagers_results(name: str, dtype: str) -> None:
    check(name, dtype, which=1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", of_cuda(NAMES[5::10]))
def test_an_operator_gives_eagers_results_by_fused_kernels(name: str, dtype: str) -> None:
    check(name, dtype, which=1, fused=True)


OF_INTEGERS = (
    *("amax", "argmax", "argmin", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_xor"),
    *("bitwise_right_shift", "constant_pad_nd", "gather", "index_select", "max.reduction_with_dim", "median", "mode"),
    *("min.reduction_no_dim", "nn.functional.pad.reflect", "repeat_interleave", "scatter_reduce.mean", "sum", "trace"),
)
"""Operators whose own kernels CUDA lacks for integers, and which read at indices."""


@pytest.mark.parametrize("dtype", ["int64", "bool"])
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_an_operator_of_integers_gives_eagers_results_by_fused_kernels(name: str, dtype: str) -> None:
    check(name, dtype, which=1, fused=True)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, "int64", "bool"])
@pytest.mark.parametrize("name", of_cuda(NAMES))
def test_every_operator_gives_eagers_results(name: str, dtype: str, fused: bool) -> None:
    check(name, dtype, fused=fused)


@pytest.mark.parametrize(
    "options",
    [
        {"debug": {"verify": True}},
        {"mode": "debug"},
        {"debug": {"fuse": False}},
        {"memory_budget": 0.3},
        {"debug": {"contrib_ops": False}},
    ],
    ids=str,
)
def test_options_have_their_meaning_where_kernels_are_fused(options: dict[str, Any]) -> None:
    workload = build("gpt2", "tiny")
    subject, ours = (copy.deepcopy(workload.module) for _ in range(2))
    eager = trained(subject, subject, workload.batch)
    given = {"mode": options["mode"]} if "mode" in options else {"options": options}
    with cuda_forms(fused=True) as found:
        run = torch.compile(ours, backend="ort_train", fullgraph=True, **given)
        assert_as_near(trained(run, ours, workload.batch), eager, eager, torch.float32)
    assert bool(found.kernels) == (options != {"debug": {"fuse": False}})


# -- the helper itself -------------------------------------------------------------------------------------------------

HALVES = """<ir_version: 9, opset_import: ["": 20]>
test (bfloat16[2,3] x, bool c) => (bfloat16[2,3] y, bfloat16[2,3] z) <bfloat16[2,3] a, int64[2] s> {
    a = Sin (x)  y = Add (a, x)  s = Shape (a)
    z = If (c) <then_branch = one () => (bfloat16[2,3] b) { b = Cos (a) },
                else_branch = other () => (bfloat16[2,3] d) { d = Identity (a) }> }"""


def test_a_node_without_a_kernel_computes_in_float32() -> None:
    cpu, model = find_target("cpu"), onnx.parser.parse_model(HALVES)
    assert not cpu.takes("Sin", "", {"T": onnx_bfloat16()})
    before = kernels_lacking(model, cpu)
    counted = widened(model, cpu)
    assert counted == before
    assert "Sin, T=BFLOAT16" in counted
    assert "Cos, T=BFLOAT16" in counted, "in a branch, of a value around it"
    onnx.checker.check_model(model, full_check=True)
    assert not kernels_lacking(model, cpu)
    assert not widened(model, cpu)


def onnx_bfloat16() -> Any:
    node = onnx.helper.make_node("Sin", ["x"], ["y"])
    return bound_dtypes(node, {"x": onnx.TensorProto.BFLOAT16, "y": onnx.TensorProto.BFLOAT16})["T"]


def test_missing_cpu_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = find_target("cpu")
    kernels = {key: kernel for key, kernel in cpu.kernels.items() if key != ("", "Sin")}
    monkeypatch.setattr(cuda_forms_module, "find_target", lambda _: dataclasses.replace(cpu, kernels=kernels))
    with cuda_forms() as found, pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(torch.sin, backend="ort_train")(torch.randn(3))
    assert isinstance(caught.value.inner_exception, NoKernelError)
    assert found.lacking == {"Sin, T=FLOAT": 1}


def test_the_forms_are_cudas() -> None:
    target = cuda_target()
    assert target.device_type == "cuda"
    assert target.has_defect("extremes_of_infinity")
    x, w = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    with cuda_forms(leaves_convolution_gradients=False) as found:
        y = torch.compile(lambda x, w: F.conv2d(x, w), backend="ort_train")(x, w)
        torch.autograd.grad(y.sum(), [x, w])
    if target.is_training_build:
        assert found.operators["ConvGrad"], "its own kernel for gradients"
    else:
        assert found.operators["Conv"] == 2, "the gradient of a weight is a convolution"
        assert found.operators["ConvTranspose"] == 1
    y = torch.compile(lambda x: x.sin(), backend="ort_train")(x)
    assert found.operators.total() < 20
