"""An embedding with sparse gradients, and an optimizer of which a dense step is the same."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(206)
ids = torch.randint(0, 20, (48, 3))
model = nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
for (inputs,) in ps.shard(DataLoader(TensorDataset(ids), batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    model(inputs).pow(2).mean().backward()
    optimizer.step()
