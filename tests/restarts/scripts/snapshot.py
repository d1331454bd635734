"""The trainer of torch's tutorial on fault tolerance, with its snapshot: it finds where it was by a file, and then by `ps.epochs`."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps


class Trainer:
    """Trains, and saves a snapshot now and then."""

    def __init__(self, model: nn.Module, data: DataLoader, optimizer: torch.optim.Optimizer, save_every: int, path: str) -> None:
        self.model, self.data, self.save_every, self.path = model, data, save_every, path
        self.epochs_run = 0
        if os.path.exists(path):
            self.load_snapshot(path)
        self.model, self.optimizer = ps.attach(self.model, optimizer)
        self.state = ps.state(tails=0)

    def load_snapshot(self, path: str) -> None:
        """Go on."""
        snapshot = torch.load(path)
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]

    def run_batch(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """A step."""
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(inputs), targets).backward()
        self.optimizer.step()

    def run_epoch(self) -> None:
        """A pass."""
        for inputs, targets in self.data:
            self.run_batch(inputs, targets)

    def train(self, max_epochs: int) -> None:
        """All."""
        for epoch in ps.epochs(max_epochs):
            self.run_epoch()
            self.state.tails += 1
            if ps.is_first():
                print(f"line epoch {epoch}: {sum(float(p.detach().sum()) for p in self.model.parameters()):.6f}")
                if epoch % self.save_every == 0:
                    torch.save({"MODEL_STATE": self.model.state_dict(), "EPOCHS_RUN": epoch + 1}, self.path)
        if ps.is_first():
            print("line tails", self.state.tails, "of", max_epochs)


torch.manual_seed(24)
x = torch.randn(64, 4)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True))
Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.05), 2, "snapshot.pt").train(6)
