"""Tensor parallel: a column-wise and a row-wise layer, whose collectives are in the compiled graph.

torchrun --standalone --nproc-per-node 2 examples/distributed/tensor_parallel.py
"""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

distributed.init_process_group("gloo")
rank = distributed.get_rank()
mesh = init_device_mesh("cpu", (distributed.get_world_size(),))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
compiled = torch.compile(model, backend="ort_train")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

generator = torch.Generator().manual_seed(1)  # all ranks of a layer have the same data
for step in range(20):
    x = torch.randn(32, 16, generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(compiled(x), x[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}")

distributed.destroy_process_group()
