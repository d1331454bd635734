"""Two phases: pretraining on one loader, then fine-tuning on others by the number of the epoch; `while` with patience in the second."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps


class Meter:
    """A mean of the script's own."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        """One more."""
        self.total, self.count = self.total + value, self.count + 1

    def state_dict(self) -> dict[str, float]:
        """Both numbers."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Back."""
        vars(self).update(state)


def main() -> None:
    """Train."""
    torch.manual_seed(7)
    x = torch.randn(96, 4)
    y = x.sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
    meter = Meter()
    state = ps.state(meter=meter, patience=3, best=float("inf"), tails=0)
    first = ps.shard(DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True))
    for epoch in ps.epochs(2):
        for inputs, targets in first:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            meter.add(loss.item())
        if ps.is_first():
            print(f"line pretrained {epoch}: {meter.total / meter.count:.6f} of {meter.count}")
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    for epoch in ps.epochs():
        size = 8 if epoch % 2 else 16
        for inputs, targets in ps.shard(DataLoader(TensorDataset(x[32:], y[32:]), batch_size=size, shuffle=True)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        error = nn.functional.mse_loss(model(x), y).item()
        state.tails += 1
        state.patience -= error > state.best - 0.05
        state.best = min(state.best, error)
        if ps.is_first():
            print(f"line tuned {epoch}: {error:.6f} best {state.best:.6f} patience {state.patience}")
        if state.patience == 0:
            break
    if ps.is_first():
        print("line tails", state.tails, "of", epoch + 1)


main()
