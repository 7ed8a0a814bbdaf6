"""The usage examples of ORTModule's documents run, unchanged but for the import."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_program

PREPARED = """
import torch

def build_model():
    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = torch.nn.Linear(16, 32)
            self.fc2 = torch.nn.Linear(32, 4)

        def forward(self, batch):
            images, labels = batch
            return torch.nn.functional.cross_entropy(self.fc2(torch.relu(self.fc1(images))), labels)

    return Classifier()

torch.manual_seed(0)
rule = torch.randn(16, 4)
images = torch.randn(256, 16)
dataloader = list(zip(images.split(32), (images @ rule).argmax(1).split(32))) * 8
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
"""

BASIC = """
model = build_model()

from ort_dynamo.training.ortmodule import ORTModule
model = ORTModule(model)
model(dataloader[0]).backward()
"""

DEBUG = """
model = build_model()

from ort_dynamo.training.ortmodule import ORTModule, DebugOptions, LogLevel
model = ORTModule(model, DebugOptions(save_onnx=True, log_level=LogLevel.VERBOSE, onnx_prefix="model_name"))
model(dataloader[0]).backward()
"""

USAGE = """
import torch
from ort_dynamo.training.ortmodule import ORTModule

# Construct the model
model = build_model()

# Wrap with ORTModule (do this BEFORE other wrappers)
model = ORTModule(model)

# Now wrap with distributed training (if needed)
model = torch.nn.parallel.DistributedDataParallel(model)

# Training loop works exactly as before
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
losses = []
for batch in dataloader:
    loss = model(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert sum(losses[-8:]) < sum(losses[:8])
"""


@pytest.mark.parametrize("example", [BASIC, DEBUG, USAGE], ids=["basic", "debug", "usage"])
def test_an_example_runs(example: str, tmp_path: Path) -> None:
    end = "\ntorch.distributed.destroy_process_group()\nprint('ran')"
    run = run_program(PREPARED + example + end, cwd=tmp_path)
    assert run.stdout.strip().endswith("ran"), run.stderr
    saved = {path.name for path in tmp_path.iterdir()}
    assert ("model_name_execution_model_training.onnx" in saved) == (example is DEBUG)
