"""Arrays of numpy as a dataset that is written in the script, and a dictionary as its samples."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import psjob as ps

torch.manual_seed(114)


class Arrays(Dataset):
    def __init__(self):
        chance = np.random.default_rng(0)
        self.x = chance.standard_normal((42, 6)).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": np.float32(self.x[i].sum()), "number": i}


model = nn.Linear(6, 1)
model, optimizer = ps.attach(model, torch.optim.Adagrad(model.parameters(), lr=0.1))
for _ in range(2):
    for batch in ps.shard(DataLoader(Arrays(), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.huber_loss(model(batch["x"]).squeeze(1), batch["y"]).backward()
        optimizer.step()
