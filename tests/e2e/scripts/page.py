"""Trains slowly, tells its loss, and waits for a file before it continues and before it ends."""

import time
from pathlib import Path

import torch

import psjob as ps

model = torch.nn.Linear(4, 1)
model, opt = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(4000, 4))
for number, (x,) in enumerate(ps.shard(torch.utils.data.DataLoader(data, batch_size=8)), 1):
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    ps.report(loss=loss.item())
    print(f"told {number}", flush=True)
    while number == 5 and not Path("go").exists():
        time.sleep(0.05)
    if number >= 30 and Path("end").exists():
        break
    time.sleep(0.1)
