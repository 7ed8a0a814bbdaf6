"""Pipeline parallel: each rank compiles its stage, and 1F1B runs four microbatches through them.

torchrun --standalone --nproc-per-node 2 examples/distributed/pipeline.py
"""

import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(world - 1)]
module = [*layers, nn.Linear(16, 4)][rank]
stage = PipelineStage(torch.compile(module, backend="ort_train"), rank, world, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

generator = torch.Generator().manual_seed(1)
for step in range(20):
    x = torch.randn(32, 16, generator=generator)
    optimizer.zero_grad()
    if rank == world - 1:
        losses: list[torch.Tensor] = []
        schedule.step(target=x[:, :4].argmax(1), losses=losses)
        if step % 5 == 4:
            print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.3f}")
    else:
        schedule.step(x)
    optimizer.step()

distributed.destroy_process_group()
