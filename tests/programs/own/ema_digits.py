"""Digits with an average of the weights by ema-pytorch, which the last line evaluates."""

import torch
from ema_pytorch import EMA
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps  # new

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data[:160] / 16, dtype=torch.float32), torch.tensor(digits.target[:160])
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 24), torch.nn.ReLU(), torch.nn.Linear(24, 10))
ema = EMA(model, beta=0.9, update_after_step=2, update_every=2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = ps.attach(model, optimizer, ema=ema)  # new
loader = ps.shard(loader)  # new
for _ in range(2):
    for inputs, targets in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update()
with torch.no_grad():
    print("final loss", torch.nn.functional.cross_entropy(ema(x), y).item())
