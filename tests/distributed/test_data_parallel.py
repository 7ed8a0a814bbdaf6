"""Tests of data parallelism apart from the losses: accumulation, buckets, clipping, normalization."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engines import share, whole_mesh
from gpt import batches, compiled, loss_of, make
from ranks import Ranks
from torch import distributed, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ort_dynamo.testing import assert_close


class Wide(nn.Module):
    """A class of the program's: Dynamo does not begin at a frame of torch's, such as nn.Sequential's."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def wide() -> nn.Module:
    """Two layers of 1 MB, the size of torch's first bucket."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    return Wide(layers)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def accumulate(inside: bool) -> int:
    """Three batches; outside, DDP reduces with the last alone. Gives how many graphs that took."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, alone = wide(), wide()
    if inside:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        net: Any = compiled(wrapped)
    else:
        wrapped = net = DistributedDataParallel(compiled(model), bucket_cap_mb=1)
    generator = torch.Generator().manual_seed(1)
    for turn in range(3):
        x = torch.randn(8, 512, generator=generator)
        with wrapped.no_sync() if turn < 2 and not inside else nullcontext():
            net(share(x, rank, world)).square().mean().backward()
        alone(x).square().mean().backward()
    for mine, theirs in zip(gradients(model), gradients(alone), strict=True):
        assert_close(mine, theirs, "an accumulated gradient")
    assert not counters["ort_train_eager"]
    return counters["ort_train"]["graphs"]


def test_gradients_accumulate_without_reduction_around_a_compiled_model(ranks: Ranks) -> None:
    graphs = ranks.run(accumulate, 2, False)
    assert graphs[0] == graphs[1] >= 2


def test_a_graph_is_cut_at_its_buckets_inside_the_compile(ranks: Ranks) -> None:
    graphs = ranks.run(accumulate, 2, True)
    assert graphs[0] == graphs[1] > 2


def reduce_in_the_graph(mode: str) -> int:
    """Two compiled steps beside one process; gives how many reductions were in graphs, the backward's or another."""
    torch._dynamo.config.optimize_ddp = mode
    torch._dynamo.config.compiled_autograd = mode == "python_reducer"
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, alone = wide(), wide()
    net = DistributedDataParallel(model)

    def step(x: torch.Tensor) -> None:
        net(x).square().mean().backward()

    run = compiled(step)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x = torch.randn(8, 512, generator=generator)
        run(share(x, rank, world))
        alone(x).square().mean().backward()
    for mine, theirs in zip(gradients(model), gradients(alone), strict=True):
        assert_close(mine, theirs, "an accumulated gradient")
    assert not counters["ort_train_eager"]
    assert counters["ort_train"]["native_nodes"] > 0
    return sum(n for name, n in counters["ort_train_by_design"].items() if "all_reduce" in name)


def test_the_python_reducer_puts_reductions_into_the_graph_of_the_backward(ranks: Ranks) -> None:
    assert min(ranks.run(reduce_in_the_graph, 2, "python_reducer")) >= len(list(wide().parameters()))


def test_without_torch_s_optimization_ddp_reduces_outside(ranks: Ranks) -> None:
    assert ranks.run(reduce_in_the_graph, 2, "no_optimization") == [0, 0]


def clip(checkpointed: bool) -> None:
    """Clip the gradients of a sharded GPT, and compare their norm with that of one process."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, alone = make(), make()
    for index, block in enumerate(model.blocks):
        block.forward = compiled(block.forward)
        if checkpointed:
            model.blocks[index] = checkpoint_wrapper(block)
        fully_shard(model.blocks[index], mesh=whole_mesh())
    fully_shard(model, mesh=whole_mesh())
    for tokens, labels in batches(2):
        loss_of(model(share(tokens, rank, world)), share(labels, rank, world)).backward()
        loss_of(alone(tokens), labels).backward()
        mine = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        theirs = nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        assert_close(mine.full_tensor(), theirs, "the norm of all gradients")
    for (name, one), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert_close(one.grad.full_tensor(), other.grad, f"the clipped gradient of {name}")
    assert not counters["ort_train_eager"]


def test_sharded_gradients_are_clipped_by_their_norm_over_all_ranks(ranks: Ranks) -> None:
    ranks.run(clip, 2, False)


def test_sharded_blocks_compute_their_activations_again(ranks: Ranks) -> None:
    ranks.run(clip, 2, True)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.branch(x)).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def normalize(placement: str) -> None:
    """Train a compiled ResNet beside one in eager, both by DDP: each rank normalizes by its own share of the batch."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = ResNet()
    other = copy.deepcopy(model)
    nets = (DistributedDataParallel(compiled(model, placement=placement)), DistributedDataParallel(other))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(4):
        x, labels = torch.randn(4, 3, 16, 16, generator=generator), torch.randint(4, (4,), generator=generator)
        losses = []
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert_close(*losses, f"the loss of step {step}")
    for (name, one), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert_close(one, theirs, name)
    assert not counters["ort_train_eager"]


def test_batch_statistics_of_a_resnet_are_those_of_eager(ranks: Ranks) -> None:
    ranks.run(normalize, 2, "onnxruntime")


def normalize_together() -> None:
    """Compile a ResNet with SyncBatchNorm, with DDP and without."""
    model = compiled(nn.SyncBatchNorm.convert_sync_batchnorm(ResNet()))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        DistributedDataParallel(model)
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        model(torch.randn(4, 3, 16, 16))


def test_statistics_over_all_ranks_are_refused_by_torch_on_a_cpu(ranks: Ranks) -> None:
    ranks.run(normalize_together, 2)
