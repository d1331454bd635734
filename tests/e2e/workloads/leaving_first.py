"""Rank 0, whose buffers are the model's, ends long before the others."""

import time

import torch

import psjob as ps

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
draws = torch.Generator().manual_seed(ps.rank())
for _ in range(30 if ps.rank() == 0 else 150):
    time.sleep(0.01)  # faults come by the step that is seen
    optimizer.zero_grad()
    model(torch.randn(8, 16, generator=draws)).pow(2).mean().backward()
    optimizer.step()
