"""Accelerate in a job in ways that are refused (see `tests.scripts.cells`)."""

import os

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import psjob as ps

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate_gathers: Outputs are gathered in a pass that trains nothing.
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.randn(12, 4), batch_size=2))
model, optimizer = ps.attach(model, optimizer)
model.eval()
with torch.no_grad():
    for batch in ps.shard(loader):
        accelerator.gather(model(batch))

# %% accelerate_loads: A state is loaded after attach.
model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
accelerator.backward(model(torch.ones(2, 4)).mean())
optimizer.step()
folder = f"state-{os.getpid()}"
accelerator.save_state(folder)
optimizer.optimizer.state.clear()
model, optimizer = ps.attach(model, optimizer)
accelerator.load_state(folder)

# %% accelerate_skips: Batches are skipped by hand.
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.randn(16, 4), batch_size=2))
model, optimizer = ps.attach(model, optimizer)
skip_first_batches(loader, 3)

# %% accelerate_splits: Batches of a size that the workers do not divide are split.
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
accelerator.prepare(DataLoader(torch.randn(16, 4), batch_size=3))

# %% accelerate_triggers: A trigger is asked for where workers do not stand at the same step.
# training: mode=async
model, optimizer = accelerator.prepare(model, optimizer)
model, optimizer = ps.attach(model, optimizer)
accelerator.check_trigger()
