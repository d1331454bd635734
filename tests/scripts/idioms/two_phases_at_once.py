"""The head is trained, then the whole model with another optimizer; both are given to attach before."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(206)
x = torch.randn(48, 4)
model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1))
model[0].requires_grad_(False)
loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))
first = torch.optim.SGD(model[1].parameters(), lr=0.05, momentum=0.9)
second = torch.optim.AdamW(model.parameters(), lr=1e-3)
ps.attach(model, (first, second))


def train(optimizer, epochs):
    for _ in epochs:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


train(first, ps.epochs(2))
model[0].requires_grad_(True)
train(second, ps.epochs(2))
