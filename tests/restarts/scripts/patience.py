"""A `while` loop with patience, whose best weights are kept in memory and put back at the end."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(13)
x = torch.randn(96, 5)
y = (x @ torch.randn(5, 1)).tanh()
model = nn.Sequential(nn.Linear(5, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 1))
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=0.04))
state = ps.state(best=float("inf"), patience=3, weights={}, tails=0)
loader = ps.shard(DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True))
epochs = iter(ps.epochs(12))
while state.patience > 0 and (epoch := next(epochs, None)) is not None:
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x[64:]), y[64:]).item()
    state.tails += 1
    if loss < state.best - 0.02 or epoch < 4:
        state.best, state.patience = loss, 3
        state.weights = copy.deepcopy(model.state_dict())
    else:
        state.patience -= 1
    if ps.is_first():
        print(f"line epoch {epoch}: {loss:.6f} best {state.best:.6f} patience {state.patience}")
if ps.is_first():
    best = sum(float(value.double().sum()) for value in state.weights.values())
    print(f"line tails {state.tails} of {epoch + 1}; best {state.best:.6f}, sum {best:.6f}")
