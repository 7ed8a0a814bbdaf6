"""Forms of CUDA have no node for which the host would wait: no choice and no loop that data decide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_forms import cuda_forms
from torch import Tensor

from ort_dynamo.testing import assert_close

pytestmark = pytest.mark.default_placement

INDEX = torch.tensor([[0, 2, 1, 1, 0, 2, 2]]).expand(5, 7)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
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


@pytest.mark.parametrize("fused", [False, True], ids=["nodes", "fused"])
@pytest.mark.parametrize("special", [False, True], ids=["finite", "nan and infinity"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_form_has_no_choice_and_no_loop(name: str, special: bool, fused: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7)
    if special:
        x[1, 2], x[2, 3], x[3, 4], x[3, 5] = float("nan"), float("inf"), -float("inf"), float("nan")
    with cuda_forms(fused=fused) as found:
        result = torch.compile(FUNCTIONS[name], backend="ort_train", fullgraph=True)(x)
    assert_close(result, FUNCTIONS[name](x), name)
    assert not {"If", "Loop", "Scan"} & found.operators.keys()


@pytest.mark.parametrize("name", ["cumprod", "searchsorted", "cummax", "logcumsumexp", "mode", "sort", "median"])
def test_a_form_of_a_size_that_varies_has_no_loop(name: str) -> None:
    functions = FUNCTIONS | {
        "cummax": lambda x: x.cummax(1).values,
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "mode": lambda x: x.round().mode(1).values,
    }
    x = torch.randn(5, 7)
    with cuda_forms(fused=True) as found:
        result = torch.compile(functions[name], backend="ort_train", fullgraph=True, dynamic=True)(x)
    assert_close(result, functions[name](x), name)
    assert not {"If", "Loop", "Scan"} & found.operators.keys()
