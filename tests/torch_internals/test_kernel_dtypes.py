"""The dtypes of torch's kernels are those of the table; those of a CPU, and of a device where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ort_dynamo.torch_internals.kernels.kernel_dtypes import running_dtypes, statistics_dtype

aten = torch.ops.aten

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def arguments(name: str, x: torch.Tensor, weight: Any, bias: Any, running: Any, training: bool) -> tuple[Any, ...]:
    """The arguments of an operator: of a batch normalization, if not for layers or groups."""
    return {
        "native_layer_norm": (x, [4, 3], weight, bias, 1e-5),
        "native_group_norm": (x, weight, bias, 2, 4, 3, 2, 1e-5),
        "_native_batch_norm_legit.no_stats": (x, weight, bias, training, 0.1, 1e-5),
        "_native_batch_norm_legit_no_training": (x, weight, bias, *running, 0.1, 1e-5),
        "_batch_norm_with_update_functional": (x, weight, bias, *running, 0.1, 1e-5),
        "_batch_norm_no_update": (x, weight, bias, *running, 0.1, 1e-5),
    }.get(name, (x, weight, bias, *running, training, 0.1, 1e-5))


@pytest.mark.parametrize("has_parameters", [True, False])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        *("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit.no_stats"),
        *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
        *("_batch_norm_with_update_functional", "_batch_norm_no_update"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_statistics_have_the_dtype_of_the_table(
    device: str, name: str, dtype: torch.dtype, wide: bool, has_parameters: bool
) -> None:
    if wide and dtype in (torch.float32, torch.float64):
        pytest.skip("parameters of a wide tensor have its dtype")
    if wide and device == "cuda" and name in ("native_layer_norm", "native_group_norm"):
        pytest.skip("CUDA's kernel takes one dtype")
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(aten, packet), overload or "default")
    x = torch.randn(2, 4, 3, dtype=dtype, device=device)
    of = torch.float32 if wide else dtype
    sizes = (4, 3) if name == "native_layer_norm" else (4,)
    weight, bias = (torch.ones(sizes, dtype=of, device=device) if has_parameters else None for _ in range(2))
    running = [torch.ones(4, dtype=of, device=device) for _ in range(2)]
    given = arguments(name, x, weight, bias, running, training=True)
    found = operator(*given)
    assert found[1].dtype == found[2].dtype == statistics_dtype(operator, given)
    for index, promised in running_dtypes(operator, given).items():
        assert found[index].dtype == promised
