"""A CNN with BatchNorm, an evaluation after each epoch, a schedule and early stopping."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(0)
x = torch.randn(96, 1, 6, 6)
y = (x.mean((1, 2, 3)) > 0).long()
train, held = TensorDataset(x[:64], y[:64]), (x[64:], y[64:])
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer = ps.attach(model, optimizer)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
state = ps.state(best=0.0, bad=0, history=[], schedule=schedule, tails=0)
loader = ps.shard(DataLoader(train, batch_size=8, shuffle=True))
for epoch in ps.epochs(9):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    state.schedule.step()
    state.tails += 1
    model.eval()
    with torch.no_grad():
        accuracy = (model(held[0]).argmax(1) == held[1]).float().mean().item()
    state.history.append(round(accuracy, 4))
    state.bad = 0 if accuracy > state.best else state.bad + 1
    state.best = max(state.best, accuracy)
    if ps.is_first():
        print(f"line epoch {epoch}: {accuracy:.4f} best {state.best:.4f} bad {state.bad} lr {optimizer.param_groups[0]['lr']:.5f}")
    if state.bad == 6:
        break
if ps.is_first():
    print("line tails", state.tails, "of", epoch + 1, state.history)
