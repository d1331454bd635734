"""A variational autoencoder, whose noise is each worker's own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(108)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, dim=1)
        code = mean + (0.5 * spread).exp() * torch.randn(mean.shape, generator=noise)
        loss = (self.decode(code) - x).pow(2).sum(1) - 0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(1)
        return loss.mean()


noise = torch.Generator().manual_seed(ps.rank())
model = VAE()
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=1e-2))
for _ in range(2):
    for (x,) in ps.shard(DataLoader(TensorDataset(torch.arange(320.0).view(40, 8).sin()), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
