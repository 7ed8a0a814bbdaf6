"""Training of the GPT by each of torch's engines: the code around the model, without the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpt import GPT, adam, batches, compiled, loss_of, make, ran
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ENGINES", "train"]

Compile = Callable[[Any], Any]


def train(name: str, dropout: float = 0.0, eager: bool = False, steps: int = 20) -> Any:
    """Train with the engine of this name, and give the observations of the rank."""
    torch.manual_seed(100 + distributed.get_rank())
    return ran(ENGINES[name](dropout, (lambda module: module) if eager else compiled, steps))


def share(batch: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    return batch.chunk(parts)[part]


def mean(loss: torch.Tensor, group: Any = None) -> float:
    loss = loss.detach().clone()
    distributed.all_reduce(loss, group=group)
    return loss.item() / distributed.get_world_size(group)


def steps_of(
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int,
    group: Any = None,
    before_update: Callable[[], None] = lambda: None,
) -> list[float]:
    """The loop that all but pipelines have; `group` is who shares the batch."""
    part, parts = distributed.get_rank(group), distributed.get_world_size(group)
    losses = []
    for tokens, labels in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model(share(tokens, part, parts)), share(labels, part, parts))
        loss.backward()
        before_update()
        optimizer.step()
        losses.append(mean(loss, group))
    return losses


# -- data parallel -------------------------------------------------------------------------------------------------


def ddp_outside(dropout: float, compile_: Compile, steps: int) -> list[float]:
    model = make(dropout)
    seed()
    return steps_of(DistributedDataParallel(compile_(model)), adam(model.parameters()), steps)


def ddp_inside(dropout: float, compile_: Compile, steps: int) -> list[float]:
    """The model is smaller than the smallest bucket, so that torch's DDPOptimizer leaves it whole."""
    model = make(dropout)
    seed()
    return steps_of(compile_(DistributedDataParallel(model)), adam(model.parameters()), steps)


def zero1(dropout: float, compile_: Compile, steps: int) -> list[float]:
    model = make(dropout)
    seed()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3, foreach=False)
    return steps_of(DistributedDataParallel(compile_(model)), optimizer, steps)


def dtensor_data_parallel(dropout: float, compile_: Compile, steps: int) -> list[float]:
    """Parameters are replicated DTensors, the batch a sharded one; gradients are reduced inside the graph."""
    mesh = whole_mesh()
    model = make(dropout, fused=False)
    distribute_module(model, mesh)
    seed()
    run = compile_(model)
    optimizer = adam(model.parameters())
    losses = []
    for tokens, labels in batches(steps):
        optimizer.zero_grad()
        logits = run(distribute_tensor(tokens, mesh, [Shard(0)]))
        loss = loss_of(logits, distribute_tensor(labels, mesh, [Shard(0)]))
        loss.backward()
        optimizer.step()
        losses.append(loss.full_tensor().item())
    return losses


# -- sharded -------------------------------------------------------------------------------------------------------


def fsdp2(dropout: float, compile_: Compile, steps: int) -> list[float]:
    """Each block and the rest are sharded, and the model is compiled whole: Dynamo breaks the graph at FSDP's hooks."""
    model = shard_blocks(make(dropout), whole_mesh())
    seed()
    return steps_of(compile_(model), adam(model.parameters()), steps)


def fsdp2_block_by_block(dropout: float, compile_: Compile, steps: int) -> list[float]:
    model = make(dropout)
    compile_blocks(model, compile_)
    shard_blocks(model, whole_mesh())
    seed()
    return steps_of(model, adam(model.parameters()), steps)


def shard_blocks(model: GPT, mesh: DeviceMesh) -> GPT:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def compile_blocks(model: GPT, compile_: Compile) -> None:
    """Compile each block in its place; its parameters keep their names."""
    for block in model.blocks:
        block.forward = compile_(block.forward)


# -- tensor parallel -----------------------------------------------------------------------------------------------


def tensor_parallel(dropout: float, compile_: Compile, steps: int) -> list[float]:
    """Tensor parallel by 2, and DDP over the two pairs where there are 4 ranks."""
    mesh = pairs()
    model = make(dropout)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    seed(mesh["data"].get_local_rank())
    if mesh["data"].size() == 1:
        return steps_of(compile_(model), adam(model.parameters()), steps, mesh["data"].get_group())
    replicate_over(model, mesh["data"])
    return steps_of(compile_(model), adam(model.parameters()), steps, mesh["data"].get_group())


PLAN = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(),
    "feed.wide": ColwiseParallel(),
    "feed.narrow": RowwiseParallel(),
}
"""Megatron's: two collectives for each block and direction."""


def replicate_over(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average gradients over a mesh when they are there; DDP itself refuses DTensors of another mesh."""
    group = mesh.get_group()

    def average(parameter: torch.Tensor) -> None:
        grad = parameter.grad
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        distributed.all_reduce(local, group=group)
        local /= mesh.size()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)


def sequence_parallel(dropout: float, compile_: Compile, steps: int) -> list[float]:
    """Do the same with activations sharded along the sequence: two gathers and two scatters replace the all-reduces."""
    mesh = pairs()
    model = make(dropout)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], SEQUENCE_PLAN)
    parallelize_module(
        model,
        mesh["tensor"],
        {
            "blocks.0": PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
            ),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    seed(mesh["data"].get_local_rank())
    replicate_over(model, mesh["data"])
    return steps_of(compile_(model), adam(model.parameters()), steps, mesh["data"].get_group())


SEQUENCE_PLAN = {
    "before_attention": SequenceParallel(),
    "before_feed": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed.wide": ColwiseParallel(),
    "feed.narrow": RowwiseParallel(output_layouts=Shard(1)),
}


def fsdp2_tp(dropout: float, compile_: Compile, steps: int) -> list[float]:
    """FSDP2 over the pairs of tensor parallel ranks, compiled block by block."""
    mesh = pairs()
    model = make(dropout)
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], PLAN)
    compile_blocks(model, compile_)
    shard_blocks(model, mesh["data"])
    seed(mesh["data"].get_local_rank())
    return steps_of(model, adam(model.parameters()), steps, mesh["data"].get_group())


# -- pipelines -----------------------------------------------------------------------------------------------------


class First(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.tokens, self.places, self.dropout = model.tokens, model.places, model.dropout
        self.positions, self.block = model.positions, model.blocks[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.block(self.dropout(self.tokens(tokens) + self.places(self.positions)))


class Last(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.block, self.norm, self.head = model.blocks[1], model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(x)))


def pipeline(schedule: type[Any], dropout: float, compile_: Compile, steps: int, microbatches: int = 2) -> list[float]:
    """Two stages, and data parallel over the pairs where there are 4 ranks."""
    mesh = pairs()
    stages, data = mesh["tensor"], mesh["data"]
    index, last = stages.get_local_rank(), stages.size() - 1
    part = (First, Last)[index](make(dropout))
    seed()
    replicate_over(part, data)
    stage = PipelineStage(compile_(part), index, stages.size(), torch.device("cpu"), group=stages.get_group())
    scheduled = schedule(stage, n_microbatches=microbatches, loss_fn=loss_of)
    optimizer = adam(part.parameters())
    losses = []
    for tokens, labels in batches(steps):
        optimizer.zero_grad()
        tokens, labels = (share(one, data.get_local_rank(), data.size()) for one in (tokens, labels))
        found: list[torch.Tensor] = []
        if index == last:
            scheduled.step(target=labels, losses=found)
        else:
            scheduled.step(tokens)
        optimizer.step()
        loss = torch.stack([one.detach() for one in found]).mean() if found else torch.zeros(())
        distributed.all_reduce(loss)
        losses.append(loss.item() / data.size())
    return losses


def gpipe(dropout: float, compile_: Compile, steps: int) -> list[float]:
    return pipeline(ScheduleGPipe, dropout, compile_, steps)


def one_f_one_b(dropout: float, compile_: Compile, steps: int) -> list[float]:
    return pipeline(Schedule1F1B, dropout, compile_, steps)


# -- meshes --------------------------------------------------------------------------------------------------------


def whole_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def pairs() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))


def seed(rank: int | None = None) -> None:
    """Seed ranks by their data: ranks with the same data get the same random numbers."""
    torch.manual_seed(100 + (distributed.get_rank() if rank is None else rank))


ENGINES: dict[str, Callable[[float, Compile, int], list[float]]] = {
    "ddp_outside": ddp_outside,
    "ddp_inside": ddp_inside,
    "zero1": zero1,
    "dtensor_data_parallel": dtensor_data_parallel,
    "fsdp2": fsdp2,
    "fsdp2_block_by_block": fsdp2_block_by_block,
    "tensor_parallel": tensor_parallel,
    "sequence_parallel": sequence_parallel,
    "fsdp2_tp": fsdp2_tp,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
}
