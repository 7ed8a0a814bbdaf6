"""A profiled forward saves husks for its backward; its own results stay."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.recompute.save_no_tensors import SaveNoTensors


def half(x: Tensor) -> tuple[Tensor, ...]:
    first = torch.tanh(x)
    last = torch.tanh(first)
    return last, x, first, last


def test_saved_tensors_become_husks_and_results_do_not() -> None:
    x = torch.randn(8, 4)
    gm = make_fx(half)(x)
    assert_fx_rewrites(
        SaveNoTensors(1),
        """
        x_1: f32[8, 4]
        tanh = aten.tanh.default(x_1)  # f32[8, 4]
        tanh_1 = aten.tanh.default(tanh)  # f32[8, 4]
        return (tanh_1, x_1, tanh, tanh_1)
        """,
        """
        x_1: f32[8, 4]
        tanh = aten.tanh.default(x_1)  # f32[8, 4]
        husk = husk(tanh)  # f32[8, 4]
        tanh_1 = aten.tanh.default(tanh)  # f32[8, 4]
        husk_1 = husk(tanh_1)  # f32[8, 4]
        return (tanh_1, x_1, husk, husk_1)
        """,
        gm,
        run=False,
    )
    result, *kept = gm(x)
    assert_close(result, half(x)[0])
    assert [tensor.shape for tensor in kept] == [x.shape] * 3
    assert [tensor.untyped_storage().nbytes() for tensor in kept] == [x.untyped_storage().nbytes(), 4, 4]


def test_inputs_and_a_graph_that_keeps_nothing_stay() -> None:
    for function, outputs in ((half, 4), (lambda x: (x.tanh(), x, x), 1)):
        gm = make_fx(function)(torch.randn(8, 4))
        assert_fx_untouched(SaveNoTensors(outputs), gm)
