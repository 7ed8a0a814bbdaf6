"""Graph before, graph after, and what a run of it keeps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from ort_dynamo.passes.fx.keep_nothing import KeepNothing
from ort_dynamo.passes.running import run_passes


def half(x: Tensor) -> tuple[Tensor, ...]:
    first = torch.tanh(x)
    last = torch.tanh(first)
    return last, x, first, last


def results(gm: GraphModule) -> str:
    (output,) = gm.graph.find_nodes(op="output")
    return str(output.args[0])


def test_what_is_kept_is_a_husk_and_the_graphs_own_result_is_not() -> None:
    x = torch.randn(8, 4)
    gm = make_fx(half)(x)
    assert results(gm) == "(tanh_1, x_1, tanh, tanh_1)"
    assert [record.modified for record in run_passes([KeepNothing(1), KeepNothing(1)], gm, check=True)] == [True, False]
    assert results(gm) == "(tanh_1, x_1, husk, husk_1)"
    result, *kept = gm(x)
    assert_close(result, half(x)[0])
    assert [tensor.shape for tensor in kept] == [x.shape] * 3
    assert [tensor.untyped_storage().nbytes() for tensor in kept] == [x.untyped_storage().nbytes(), 4, 4]


def test_inputs_and_a_graph_that_keeps_nothing_stay() -> None:
    for function, outputs in ((half, 4), (lambda x: (x.tanh(), x, x), 1)):
        gm = make_fx(function)(torch.randn(8, 4))
        before = str(gm.graph)
        (record,) = run_passes([KeepNothing(outputs)], gm, check=True)
        assert not record.modified
        assert str(gm.graph) == before
