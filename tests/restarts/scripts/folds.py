"""Three folds one after the other, each with a model of its own, and their mean score."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import psjob as ps

torch.manual_seed(11)
x = torch.randn(96, 4)
y = x.sum(1, keepdim=True)
data = TensorDataset(x, y)
folds = [
    ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), name=f"fold{number}")
    for number, model in enumerate(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(3))
]
state = ps.state(scores={}, tails=0)
for number, (model, optimizer) in enumerate(folds):
    held = range(number * 32, number * 32 + 32)
    loader = ps.shard(DataLoader(Subset(data, [i for i in range(96) if i not in held]), batch_size=8, shuffle=True))
    for epoch in ps.epochs(2):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(x[held.start : held.stop]), y[held.start : held.stop]).item()
        state.tails += 1
        state.scores.setdefault(number, []).append(round(loss, 6))
        if ps.is_first():
            print(f"line fold {number} epoch {epoch}: {state.scores}")
if ps.is_first():
    print("line tails", state.tails, "of 6; mean", round(sum(scores[-1] for scores in state.scores.values()) / 3, 6))
