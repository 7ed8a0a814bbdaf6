"""Data parallel: DistributedDataParallel around a compiled model.

torchrun --standalone --nproc-per-node 2 examples/distributed/ddp.py
"""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def train(rank: int) -> None:
    """Train on data of this rank's own; all that DDP holds ends with the function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    net = DistributedDataParallel(torch.compile(model, backend="ort_train"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(20):
        x = torch.randn(32, 16, generator=generator)
        labels = x[:, :4].argmax(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")


distributed.init_process_group("gloo")
train(distributed.get_rank())  # DDP goes before its group, as docs/how_to/distributed.md asks
distributed.destroy_process_group()
