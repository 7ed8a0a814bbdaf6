"""Graph before, graph after: messages of assertions on data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.passes.fx.locate_assertions import LocateAssertions
from ort_dynamo.passes.running import run_passes


def test_a_message_ends_with_the_operator_and_the_line() -> None:
    def function(x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all(), "x is positive")
        return x * 2

    gm = make_fx(function, tracing_mode="fake")(torch.ones(2))
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg)
    node.meta["stack_trace"] = '  File "user.py", line 3, in function\n    torch._assert_async(x)\n'
    records = run_passes([LocateAssertions(), LocateAssertions()], gm, check=True)
    first, operator, line = str(node.args[1]).splitlines()
    assert (first, operator.strip()) == ("x is positive", "aten._assert_async.msg")
    assert "torch._assert_async" in line
    assert [record.modified for record in records] == [True, False]


def test_a_graph_without_assertions_stays() -> None:
    gm = make_fx(torch.sin, tracing_mode="fake")(torch.ones(2))
    assert not LocateAssertions()(gm).modified


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
