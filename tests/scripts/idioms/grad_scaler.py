"""Mixed precision with a GradScaler, one of whose steps overflows."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(9)
x = torch.randn(48, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
model, optimizer = ps.attach(model, optimizer, scaler=scaler)
for step, (inputs, targets) in enumerate(ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
    optimizer.zero_grad()
    scaler.scale(loss * (1e38 if step == 2 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
