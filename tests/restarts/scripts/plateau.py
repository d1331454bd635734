"""ReduceLROnPlateau on a validation loss, the best model saved by torch.save, a sum over all epochs."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(3)
x = torch.randn(96, 5)
y = x.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
model, optimizer = ps.attach(model, optimizer, plateau=plateau)
state = ps.state(best=float("inf"), saved=-1, seen=0, tails=0)
loader = ps.shard(DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True))
for epoch in ps.epochs(7):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        state.seen += len(inputs)
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x[64:]), y[64:]).item()
    plateau.step(loss)
    state.tails += 1
    if loss < state.best:
        state.best, state.saved = loss, epoch
        if ps.is_first():
            torch.save(model.state_dict(), "best.pt")
    if ps.is_first():
        print(
            f"line epoch {epoch}: {loss:.5f} best {state.best:.5f} of {state.saved} seen {state.seen} lr {optimizer.param_groups[0]['lr']}"
        )
if ps.is_first():
    print("line tails", state.tails, "of 7", state.saved, round(sum(p.abs().sum().item() for p in torch.load("best.pt").values()), 3))
