"""Messages of assertions on data name the operator and the line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.locate_assertions import LocateAssertions


def test_a_message_ends_with_the_operator_and_the_line() -> None:
    def function(x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all(), "x is positive")
        return x * 2

    gm = make_fx(function, tracing_mode="fake")(torch.ones(2))
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg)
    node.meta["stack_trace"] = '  File "user.py", line 3, in function\n    torch._assert_async(x)\n'
    place = '    File "user.py", line 3, in function torch._assert_async(x)'
    located = "\n".join(["x is positive", "  aten._assert_async.msg", place])
    assert_fx_rewrites(
        LocateAssertions(),
        """
        x_1: f32[2]
        gt = aten.gt.Scalar(x_1, 0)  # bool[2]
        all = aten.all.default(gt)  # bool[]
        _assert_async = aten._assert_async.msg(all, 'x is positive')
        mul = aten.mul.Tensor(x_1, 2)  # f32[2]
        return mul
        """,
        f"""
        x_1: f32[2]
        gt = aten.gt.Scalar(x_1, 0)  # bool[2]
        all = aten.all.default(gt)  # bool[]
        _assert_async = aten._assert_async.msg(all, {located!r})
        mul = aten.mul.Tensor(x_1, 2)  # f32[2]
        return mul
        """,
        gm,
        inputs=[torch.ones(2)],
    )


def test_a_graph_without_assertions_stays() -> None:
    assert_fx_untouched(LocateAssertions(), make_fx(torch.sin, tracing_mode="fake")(torch.ones(2)))


class Checked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all(), "positive")  # as Dynamo has `assert`, which pytest rewrites here
        return x * 2


def test_a_failed_assertion_names_module_and_line() -> None:
    model = torch.compile(nn.Sequential(nn.ReLU(), Checked()), backend="ort_train")
    torch.testing.assert_close(model(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(
        RuntimeError, match=r"(?s)positive.*of 1 \(Checked\).*test_locate_assertions\.py.*_assert_async"
    ):
        model(-torch.ones(2))
