"""Trains a few numbers; worker 1's first process loses its GPU at step 10: torch raises what the driver said, as its argument has it."""

import os
import sys

import torch

import psjob as ps

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
model, optimizer = ps.attach(model, optimizer)
print(f"start {os.environ['PSJOB_START']}, rewinds {os.environ.get('PSJOB_REWINDS', '0')}", flush=True)
for x, y in ps.shard(torch.utils.data.DataLoader(data, batch_size=8)):
    if ps.rank() == 1 and ps.step() == 10 and os.environ["PSJOB_START"] == "1":
        raise torch.AcceleratorError(f"{sys.argv[1]}\nCUDA kernel errors might be asynchronously reported at some other API call.")
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
