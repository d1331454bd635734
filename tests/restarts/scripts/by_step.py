"""A trainer by step, as minGPT's: an iterator that begins again, an evaluation every eight steps, a cosine schedule by hand."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import psjob as ps


class Trainer:
    """Steps and calls back."""

    def __init__(self, model: nn.Module, data: TensorDataset) -> None:
        self.model, self.optimizer = ps.attach(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        self.loader = ps.shard(DataLoader(data, batch_size=8, sampler=RandomSampler(data)))
        self.state = ps.state(tails=0, losses=[])

    def endless(self):
        """Batches of one pass after the other."""
        while True:
            yield from self.loader

    def run(self, parts: int, steps: int) -> None:
        """Train."""
        batches = self.endless()
        for part in ps.epochs(parts):
            self.model.train()
            for number in range(part * steps, part * steps + steps):
                for group in self.optimizer.param_groups:
                    group["lr"] = 0.02 * (1 + math.cos(math.pi * number / (parts * steps))) / 2
                inputs, targets = next(batches)
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                loss.backward()
                self.optimizer.step()
                self.state.losses.append(loss.item())
            self.evaluate(part)

    @torch.no_grad()
    def evaluate(self, part: int) -> None:
        """Say how it goes."""
        self.model.eval()
        self.state.tails += 1
        if ps.is_first():
            print(f"line part {part}: {nn.functional.mse_loss(self.model(x), y).item():.6f} after {len(self.state.losses)}")


torch.manual_seed(16)
x = torch.randn(48, 4)
y = x.sum(1, keepdim=True)
trainer = Trainer(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)), TensorDataset(x, y))
trainer.run(3, 8)
if ps.is_first():
    print("line tails", trainer.state.tails, "of 3; mean", round(sum(trainer.state.losses) / 24, 6))
