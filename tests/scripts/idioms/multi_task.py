"""A shared body and a head for each task; a batch trains one head."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(111)
body, heads = nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.ModuleDict({"sum": nn.Linear(16, 1), "max": nn.Linear(16, 1)})
model = nn.ModuleList([body, heads])
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=1e-2))
x = torch.randn(48, 6)
targets = {"sum": lambda x: x.sum(1, keepdim=True), "max": lambda x: x.amax(1, keepdim=True)}
for i, (inputs,) in enumerate(ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True))):
    task = ("sum", "max")[i % 2]
    optimizer.zero_grad()
    nn.functional.mse_loss(heads[task](body(inputs)), targets[task](inputs)).backward()
    optimizer.step()
