"""The head is trained, then the whole model with another optimizer, attached anew."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(206)
x = torch.randn(48, 4)
model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1))
model[0].requires_grad_(False)
loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))


def train(optimizer, epochs):
    for _ in epochs:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


_, first = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
train(first, ps.epochs(2))
model[0].requires_grad_(True)
_, second = ps.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
train(second, ps.epochs(2))
