"""Steps of models that exchange data with other processes; here in groups of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from twelve_layers import TwelveLayers, batch

import ort_dynamo
from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.torch_internals.kernels.dispatcher import TorchDispatchMode
from ort_dynamo.verification.in_double import InDouble


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    torch._dynamo.reset()


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def test_a_collective_runs_once_and_has_its_own_numbers_in_float64() -> None:
    counted, mode = Counted(), InDouble()
    x, out = torch.tensor([0.1, 0.2]), torch.zeros(2)
    with counted, mode:
        out.add_(1e-12)  # it has a float64 value of its own before
        distributed.all_gather([out], x * 3)
        result = out * 2
    assert counted.count == 1
    assert torch.equal(result, x * 3 * 2)
    assert torch.equal(mode.read(out), (x * 3).double())
    assert torch.equal(mode.read(result), (x * 3).double() * 2)


def test_a_step_of_ddp_is_checked_and_its_fault_is_named(tmp_path: Path) -> None:
    model = DistributedDataParallel(TwelveLayers())
    gradients = [one.grad for one in model.parameters()]
    result = ort_dynamo.verify(model, *batch(), folder=tmp_path)
    assert result.ok
    assert result.compared > 70

    def wrong_tanh(ctx: Any, x: Any) -> Any:
        return ctx.op.Mul(ctx.op.Tanh(x), 1.01)

    ort_dynamo.register_lowering(torch.ops.aten.tanh.default, replace=True)(wrong_tanh)
    fault = ort_dynamo.verify(model, *batch(), folder=tmp_path).fault
    assert fault is not None
    assert (fault.operator, fault.graph, fault.culprit) == ("aten.tanh.default", "forward", "lowering")
    assert [one.grad for one in model.parameters()] == gradients


def test_a_sharded_model_is_refused_with_another_way() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fully_shard(model[0])
    with pytest.raises(InvalidArgumentError, match=r"FSDPLinear.*the option verify=1 checks each graph"):
        ort_dynamo.verify(model, torch.randn(2, 4))
    flat = FullyShardedDataParallel(
        nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    with pytest.raises(InvalidArgumentError, match="FullyShardedDataParallel"):
        ort_dynamo.verify(lambda x: flat(x).sum(), torch.randn(2, 4))


def test_the_option_checks_each_graph_of_a_sharded_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    fully_shard(model[0])
    compiled = torch.compile(model, backend="ort_train", options={"verify": 1})
    compiled(torch.randn(2, 4)).sum().backward()
    assert model[0].weight.grad is not None
