"""FSDP2: each block is compiled, then sharded, and gradients are clipped by the norm over all ranks.

torchrun --standalone --nproc-per-node 2 examples/distributed/fsdp2.py
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    """A linear layer and its activation; before torch 2.15, compile() of a module of torch's own compiles nothing."""

    def __init__(self, inputs: int, outputs: int, activation: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the result of the layer and its activation."""
        return self.activation(self.linear(x))


distributed.init_process_group("gloo")
rank = distributed.get_rank()
mesh = init_device_mesh("cpu", (distributed.get_world_size(),))

torch.manual_seed(0)
blocks = [Layer(32, 32, nn.GELU()) for _ in range(3)]
model = nn.Sequential(Layer(16, 32, nn.Identity()), *blocks, Layer(32, 4, nn.Identity()))
for block in model:
    block.compile(backend="ort_train")  # before it is sharded: its hooks stay outside of the graph
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

generator = torch.Generator().manual_seed(1 + rank)
for step in range(20):
    x = torch.randn(32, 16, generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if rank == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}")

distributed.destroy_process_group()
