"""FSDP2 over tensor parallel ranks: a block is parallelized, compiled, then sharded, on a mesh of two dimensions.

torchrun --standalone --nproc-per-node 4 examples/distributed/fsdp2_tp.py
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    """Two linear layers; before torch 2.15, compile() of a module of torch's own compiles nothing."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the result of the layers."""
        return self.down(nn.functional.gelu(self.up(x)))


distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (distributed.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))

torch.manual_seed(0)
model = nn.Sequential(Block(16), Block(16), Block(4))
for block in model:
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    block.compile(backend="ort_train")  # its collectives are in the graph, FSDP's hooks stay outside
    fully_shard(block, mesh=mesh["data"])
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

# The ranks of a layer have the same data, and each row of the mesh data of its own.
generator = torch.Generator().manual_seed(1 + mesh["data"].get_local_rank())
for step in range(20):
    x = torch.randn(32, 16, generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    if distributed.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}")

distributed.destroy_process_group()
