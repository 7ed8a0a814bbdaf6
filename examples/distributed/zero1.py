"""ZeRO stage 1: as data parallel, and each rank keeps the optimizer's state of a part of the parameters.

torchrun --standalone --nproc-per-node 2 examples/distributed/zero1.py
"""

import torch
from torch import distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def train(rank: int) -> None:
    """Train on data of this rank's own; all that DDP holds ends with the function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    net = DistributedDataParallel(torch.compile(model, backend="ort_train"))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)

    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(20):
        x = torch.randn(32, 16, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), x[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")


distributed.init_process_group("gloo")
train(distributed.get_rank())  # DDP goes before its group, as docs/how_to/distributed.md asks
distributed.destroy_process_group()
