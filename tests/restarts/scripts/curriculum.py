"""A curriculum: harder data and longer batches from epoch to epoch, sampled by weights that the losses change."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import psjob as ps

torch.manual_seed(22)
x = torch.randn(96, 4)
y = x.prod(1, keepdim=True)
hard = x.abs().sum(1).argsort()
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True))
state = ps.state(weights=torch.ones(96), sizes=[], tails=0)
for epoch in ps.epochs(6):
    size = 24 + 14 * epoch
    taken = hard[:size]
    sampler = WeightedRandomSampler(state.weights[taken].tolist(), 64)
    model.train()
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x[taken], y[taken]), batch_size=8, sampler=sampler)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = (model(x) - y).pow(2).squeeze(1)
    state.weights.copy_(0.1 + losses)
    state.sizes.append(size)
    state.tails += 1
    if ps.is_first():
        print(f"line epoch {epoch}: {losses.mean().item():.6f} {state.weights.sum().item():.5f} {state.sizes}")
if ps.is_first():
    print("line tails", state.tails, "of 6")
