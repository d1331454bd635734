"""Two loader processes that stay, pinned memory asked for, noise drawn for each sample, and drop_last."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import psjob as ps


class Noisy(Dataset):
    def __len__(self):
        return 45

    def __getitem__(self, index):
        return torch.full((4,), index / 45) + 0.1 * torch.randn(4), torch.tensor([index / 45])


torch.manual_seed(23)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True))
for _ in range(2):
    for inputs, targets in loader:
        assert len(inputs) == 4
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
