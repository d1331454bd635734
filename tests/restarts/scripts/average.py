"""An average of the weights (EMA), which is evaluated."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(5)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
state = ps.state(average=average, tails=0)
for epoch in ps.epochs(6):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        average.update_parameters(model)
    with torch.no_grad():
        loss = nn.functional.mse_loss(average(x), y).item()
    state.tails += 1
    if ps.is_first():
        print(f"line epoch {epoch}: {loss:.6f} after {int(average.n_averaged)}")
if ps.is_first():
    print("line tails", state.tails, "of 6")
