"""Recognises handwritten digits with a small network. Ordinary PyTorch but for the lines that say `ps`."""

import argparse
import math

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--momentum", type=float, default=0.9)
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test = digits()
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[args.epochs * 3 // 4])
    model, optimizer = ps.attach(model, optimizer, schedule=schedule)

    total = args.epochs * math.ceil(len(loader) / ps.world())
    for epoch in ps.epochs(args.epochs):  # those that are not finished, after a restart
        for images, labels in ps.shard(loader):
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ps.report(loss=loss.item(), total=total)
        schedule.step()
        if ps.is_first():
            print(f"epoch {epoch + 1} of {args.epochs}: loss {loss.item():.4f}", flush=True)
            ps.report(test_accuracy=score(model, test))

    if ps.is_first():
        accuracy = score(model, test)
        print(f"{accuracy:.1%} of {len(test)} unseen digits recognised", flush=True)
        ps.report(test_accuracy=accuracy)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 digits to learn from and 360 to be judged by, 8x8 pixels from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=2, stratify=labels)
    seen, unseen, names, wanted = (torch.as_tensor(part) for part in parts)
    return TensorDataset(seen.float(), names), TensorDataset(unseen.float(), wanted)


@torch.no_grad()
def score(model: nn.Module, test: TensorDataset) -> float:
    """The part of `test` that the model recognises."""
    images, labels = test.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    main()
