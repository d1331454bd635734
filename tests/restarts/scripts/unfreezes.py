"""A backbone that is trained from the third epoch on."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(6)
x = torch.randn(64, 4)
y = x.prod(1, keepdim=True)
backbone, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
backbone.requires_grad_(False)
model = nn.Sequential(backbone, head)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer, later=[backbone])
state = ps.state(losses={}, tails=0)
for epoch in ps.epochs(6):
    if epoch == 2:
        backbone.requires_grad_(True)
        optimizer.add_param_group({"params": list(backbone.parameters()), "lr": 0.02})
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    state.tails += 1
    state.losses[epoch] = round(nn.functional.mse_loss(model(x), y).item(), 6)
    if ps.is_first():
        print(f"line epoch {epoch}: {state.losses[epoch]} {len(optimizer.param_groups)} groups")
if ps.is_first():
    print("line tails", state.tails, "of 6", state.losses)
