"""Functions train() and evaluate() under a main guard."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(101)


def train(model, loader, optimizer):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    return sum(nn.functional.mse_loss(model(inputs), targets).item() for inputs, targets in loader) / max(1, len(loader))


def main():
    x = torch.randn(60, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 1))
    model, optimizer = ps.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train_loader, test_loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True)), DataLoader(data, batch_size=10)
    for epoch in range(2):
        train(model, train_loader, optimizer)
        print(f"epoch {epoch} loss {evaluate(model, test_loader):.3f}")


if __name__ == "__main__":
    main()
