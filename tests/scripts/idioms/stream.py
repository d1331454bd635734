"""An IterableDataset that shuffles in a buffer, read by two loader processes."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import psjob as ps


class Lines(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        buffer = []
        for number in range(info.id if info else 0, 90, info.num_workers if info else 1):
            buffer.append(number)
            if len(buffer) == 8:
                yield torch.tensor([buffer.pop(random.randrange(8))], dtype=torch.float32) / 90
        yield from (torch.tensor([number], dtype=torch.float32) / 90 for number in buffer)


torch.manual_seed(7)
model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(Lines(), batch_size=4, num_workers=2))
for _ in range(2):
    for x in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x * x).backward()
        optimizer.step()
