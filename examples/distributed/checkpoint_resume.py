"""A checkpoint that is whole or not there, by which training goes on with any number of ranks.

torchrun --standalone --nproc-per-node 2 examples/distributed/checkpoint_resume.py FOLDER

If a rank dies, torchrun can restart all ranks, and they resume from the checkpoint (docs/how_to/distributed.md explains
the variable):

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/distributed/checkpoint_resume.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Network(nn.Module):
    """Two linear layers; before torch 2.15, compile() of a module of torch's own compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the result of the layers."""
        return self.down(nn.functional.gelu(self.up(x)))


distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
folder = Path(sys.argv[1])
mesh = init_device_mesh("cpu", (world,))

torch.manual_seed(0)
model = Network()
model.compile(backend="ort_train")
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def save(step: int) -> None:
    """Write beside the place, then rename: a rank that dies on the way leaves no checkpoint that looks whole."""
    weights, moments = get_state_dict(model, optimizer)
    unfinished = folder / f"unfinished-{step}"
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=unfinished)
    if rank == 0:
        os.rename(unfinished, folder / f"step-{step:04}")
    distributed.barrier()


def resume() -> int:
    """Load the newest checkpoint, and give how many steps went into it."""
    found = sorted(folder.glob("step-*"))
    if not found:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=found[-1])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(found[-1].name.removeprefix("step-"))


begin = resume()
for step in range(begin, 10):
    generator = torch.Generator().manual_seed(step)  # the batch of a step, for any number of ranks
    x = torch.randn(32, 16, generator=generator)
    mine = x.chunk(world)[rank]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(mine), mine[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    distributed.all_reduce(loss)
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item() / world:.6f}", flush=True)
    if step % 4 == 3:
        save(step + 1)

distributed.destroy_process_group()
