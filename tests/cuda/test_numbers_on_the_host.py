"""Numbers made of sizes are on the host: on CUDA no arithmetic of tensors follows them to the CPU.

The host waits for no number of the device: forms of CUDA have no choice and no loop that data decide.

The rule by which the provider leaves nodes to the CPU is `left_to_cpu`'s; `.ci/cuda_placement.py` asks the provider.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx.parser
import pytest
import torch
import torch.nn.functional as F
from cuda_forms import cuda_forms, cuda_target, left_to_cpu
from cuda_target import compiled_for
from torch import Tensor

from ort_dynamo.testing import assert_close

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean of rows": lambda x: x.relu().square().sum() / x.shape[0],
    "mean": lambda x: x.mean(),
    "scaled by a size": lambda x: (x * x.shape[0]).relu(),
    "scaled by a root of a size": lambda x: (x.softmax(0) * x.shape[0] ** -0.5).sum(),
    "mse_loss": lambda x: F.mse_loss(x.exp(), x),
    "variance": lambda x: (x.var(0) + x.mean()).sum(),
    "rows by a remainder": lambda x: (x[torch.arange(x.shape[0]) % 3] + x.shape[0]).sum(),
    "first half": lambda x: torch.where(torch.arange(x.shape[0])[:, None] < x.shape[0] // 2, x, x.exp()).sum(),
    "norm and mean": lambda x: F.layer_norm(x, (8,)).sum(0).div(x.shape[0]).sum(),
    "clamped by a size": lambda x: x.clamp(max=x.shape[0] / 4).exp(),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(x.shape[0]) % 8, label_smoothing=0.1),
    "padded": lambda x: F.pad(x, (1, 0), value=x.shape[0]).exp(),
    "causal": lambda x: (x @ x.T).masked_fill(torch.ones(x.shape[0], x.shape[0]).triu(1) > 0, -1e9).softmax(-1),
    "halves": lambda x: torch.cat([x[x.shape[0] // 2 :], x[: x.shape[0] // 2]]).exp(),
    "all rows but one": lambda x: x[: x.shape[0] - 1].exp(),
    "last half": lambda x: x[-(x.shape[0] // 2) :].exp(),
    "before a condition": lambda x: (x * x.shape[0]).topk(2, -1)[0],
    "a size alone": lambda x: x.sum() * torch.tensor(float(x.shape[0])),
}


AS_CONSTANTS = {"clamped by a size", "padded", "a size alone"}
"""Programs whose sizes Dynamo makes constants of, or torch's tensors."""


@pytest.mark.parametrize("fused", [False, True], ids=["nodes", "fused"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_arithmetic_of_tensors_stays_on_the_device(name: str, fused: bool) -> None:
    torch._dynamo.reset()
    with cuda_forms(fused=fused) as found:
        run = torch.compile(PROGRAMS[name], backend="ort_train", dynamic=True, options={"placement": "onnxruntime"})
        for rows in (5, 7, 2):
            x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows), requires_grad=True)
            result, right = run(x), PROGRAMS[name](x)
            torch.testing.assert_close(result, right)
            (gradient,), (expected,) = (torch.autograd.grad(one.sum(), x) for one in (result, right))
            torch.testing.assert_close(gradient, expected)
    assert found.operators["Shape"] or name in AS_CONSTANTS
    assert not found.left_to_cpu


@pytest.mark.parametrize("name", ["halves", "all rows but one", "last half"])
def test_the_sizes_of_slices_come_from_shapes(name: str) -> None:
    """No session is fed a scalar, of which CUDA would compute a shape that the host waits for."""
    torch._dynamo.reset()
    with compiled_for(cuda_target(), placement="onnxruntime") as (backend, found):
        torch.compile(PROGRAMS[name], backend=backend, dynamic=True)(torch.randn(5, 8, requires_grad=True))
    inputs = [value for model in found.models for value in model.graph.input]
    assert inputs
    assert all(value.type.tensor_type.shape.dim for value in inputs)


def test_the_rule_of_the_provider() -> None:
    """The provider of 1.31.1 places these nodes so, asked without a device."""
    header = '<ir_version: 10, opset_import: ["" : 20]>\n'
    size = "s = Shape<start = 0, end = 1>(x)  n = Squeeze(s, axis)  f = Cast<to = 1>(n)"
    of_inputs = f"g (float[n, 4] x, float t) => (float y) <int64[1] axis = {{0}}> {{ {size}  y = Div(t, f) }}"
    computed = (
        f"g (float[n, 4] x, float t) => (float y) <int64[1] axis = {{0}}> {{ {size}  u = Exp(t)  y = Div(u, f) }}"
    )
    left = [list(left_to_cpu(onnx.parser.parse_model(header + text), {})) for text in (of_inputs, computed)]
    assert left == [["Cast", "Div"], ["Cast"]]  # and Squeeze, which computes int64


INDEX = torch.tensor([[0, 2, 1, 1, 0, 2, 2]]).expand(5, 7)

WITHOUT_WAITS: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda x: x.argmax(1),
    "argsort": lambda x: x.argsort(dim=1, stable=True),
    "max": lambda x: x.max(1).values,
    "sort": lambda x: x.sort(dim=1, descending=True, stable=True).indices,
    "topk": lambda x: x.topk(3, 1).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "median": lambda x: x.median(1).values,
    "nanmedian": lambda x: x.nanmedian(1).values,
    "isin": lambda x: torch.isin(x, x[0]),
    "fractional_max_pool2d": lambda x: torch.nn.functional.fractional_max_pool2d(
        x[None], 2, output_size=(2, 3), _random_samples=torch.full((1, 1, 2), 0.5)
    ),
    "scatter_reduce": lambda x: x.scatter_reduce(1, INDEX, x * 2, "amax"),
    "interpolate": lambda x: torch.nn.functional.interpolate(
        x[None, None], size=(3, 4), mode="bilinear", antialias=True
    ),
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x),
    "igamma": lambda x: torch.special.gammainc(x.abs() + 1, x.abs() + 0.5),
    "zeta": lambda x: torch.special.zeta(x.abs() + 2, x.abs() + 0.5),
    "hermite": lambda x: torch.special.hermite_polynomial_h(x, x.abs() * 3),
    "gcd": lambda x: torch.gcd((x * 10).nan_to_num(0, 1, 1).long(), INDEX),
    "power": lambda x: (x * 3).nan_to_num(0, 1, 1).long() ** INDEX,
    "roll": lambda x: x.roll((1, -2), (0, 1)) + x.roll(9),
    "cumprod": lambda x: x.cumprod(1),
    "searchsorted": lambda x: torch.searchsorted(x.nan_to_num(0, 1, 1).sort(1).values, x.nan_to_num(0, 1, 1)),
}


@pytest.mark.default_placement
@pytest.mark.parametrize("fused", [False, True], ids=["nodes", "fused"])
@pytest.mark.parametrize("special", [False, True], ids=["finite", "nan and infinity"])
@pytest.mark.parametrize("name", WITHOUT_WAITS)
def test_a_form_has_no_choice_and_no_loop(name: str, special: bool, fused: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7)
    if special:
        x[1, 2], x[2, 3], x[3, 4], x[3, 5] = float("nan"), float("inf"), -float("inf"), float("nan")
    with cuda_forms(fused=fused) as found:
        result = torch.compile(WITHOUT_WAITS[name], backend="ort_train", fullgraph=True)(x)
    assert_close(result, WITHOUT_WAITS[name](x), name)
    assert not {"If", "Loop", "Scan"} & found.operators.keys()


@pytest.mark.default_placement
@pytest.mark.parametrize("name", ["cumprod", "searchsorted", "cummax", "logcumsumexp", "mode", "sort", "median"])
def test_a_form_of_a_size_that_varies_has_no_loop(name: str) -> None:
    functions = WITHOUT_WAITS | {
        "cummax": lambda x: x.cummax(1).values,
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "mode": lambda x: x.round().mode(1).values,
    }
    x = torch.randn(5, 7)
    with cuda_forms(fused=True) as found:
        result = torch.compile(functions[name], backend="ort_train", fullgraph=True, dynamic=True)(x)
    assert_close(result, functions[name](x), name)
    assert not {"If", "Loop", "Scan"} & found.operators.keys()


@pytest.mark.default_placement
@pytest.mark.parametrize("dims", [(0, 1), (2, 0), (1, 3, 1), (-1, 1)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "batch varies"])
def test_several_axes_roll_in_one_lookup(dims: tuple[int, ...], dynamic: bool) -> None:
    function = lambda x: x.roll((1, -2, 3)[: len(dims)], dims)  # noqa: E731
    x = torch.randn(3, 4, 5, 2)
    if varies := dynamic and 0 not in dims:
        torch._dynamo.mark_dynamic(x, 0)
    with cuda_forms() as found:
        result = torch.compile(function, backend="ort_train", fullgraph=True)(x)
    assert torch.equal(result, function(x))
    assert found.operators["Gather"] == 1
    assert not found.operators["Concat"] or varies  # of the sizes


@pytest.mark.default_placement
@pytest.mark.parametrize("fused", [False, True], ids=["nodes", "fused"])
@pytest.mark.parametrize(("shape", "dim", "own"), [
    ((3, 4, 8), 1, (3, 5, 1)), ((3, 4, 6), 2, (1, 4, 5)), ((2, 3, 4, 8), 2, (1, 3, 5, 1)), ((3, 4, 2), 1, (1, 5, 1)),
], ids=str)  # fmt: skip
def test_no_index_is_expanded_to_entries(shape: tuple[int, ...], dim: int, own: tuple[int, ...], fused: bool) -> None:
    def function(x: Tensor, i: Tensor) -> Tensor:
        return x.gather(dim, i.expand([-1 if size > 1 or at == dim else shape[at] for at, size in enumerate(own)]))

    x, index = torch.randn(shape, requires_grad=True), torch.randint(shape[dim], own)
    with cuda_forms(fused=fused) as found:
        result = torch.compile(function, backend="ort_train", fullgraph=True)(x, index)
        result.sin().sum().backward()
    gradient, x.grad = x.grad, None
    function(x, index).sin().sum().backward()
    assert torch.equal(result, function(x, index))
    torch.testing.assert_close(gradient, x.grad)
    assert not {"GatherElements", "ScatterElements"} & found.operators.keys()


@pytest.mark.default_placement
def test_a_pad_by_nothing_is_no_node() -> None:
    with cuda_forms() as found:
        x = torch.randn(2, 3)
        torch.compile(lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0)) * 2, backend="ort_train")(x)
    assert not found.operators["Pad"]
