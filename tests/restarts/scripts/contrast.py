"""Contrastive learning: a queue of keys in buffers, a second encoder that follows by momentum, augmentation by random numbers."""

import copy
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import psjob as ps


class Pairs(Dataset):
    """Two views of each sample."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = self.x[index] + 0.1 * random.random(), self.x[index] + 0.1 * torch.from_numpy(np.random.randn(6)).float()
        return one, other


class Contrast(nn.Module):
    """The encoder, the one that follows it, and the queue."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.follower = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(16, 4), dim=1))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        query = nn.functional.normalize(self.encoder(one), dim=1)
        with torch.no_grad():
            for mine, ours in zip(self.follower.parameters(), self.encoder.parameters(), strict=True):
                mine.lerp_(ours, 0.1)
            keys = nn.functional.normalize(self.follower(other), dim=1)
        scores = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.T.clone()], 1) / 0.2
        with torch.no_grad():
            self.queue[int(self.at) : int(self.at) + len(keys)] = keys
            self.at.copy_((self.at + len(keys)) % 16)
        return nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


torch.manual_seed(18)
random.seed(18)
np.random.seed(18)
model = Contrast()
model, optimizer = ps.attach(model, torch.optim.SGD(model.encoder.parameters(), lr=0.1), follower=model.follower)
state = ps.state(tails=0, mean=0.0)
loader = ps.shard(DataLoader(Pairs(torch.randn(64, 6)), batch_size=8, shuffle=True))
for epoch in ps.epochs(6):
    for one, other in loader:
        optimizer.zero_grad()
        loss = model(one, other)
        loss.backward()
        optimizer.step()
        state.mean += (loss.item() - state.mean) / 4
    state.tails += 1
    if ps.is_first():
        print(f"line epoch {epoch}: {state.mean:.6f} at {int(model.at)} {model.queue.sum().item():.6f}")
if ps.is_first():
    print("line tails", state.tails, "of 6")
