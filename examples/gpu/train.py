"""Learns a picture-like task on the worker's GPU, or on the CPU where there is none. The shards never need a GPU."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps


def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pictures = torch.rand(2048, 1, 16, 16)
    # Which half is brighter: a task that a convolution learns and that needs no download.
    brighter = (pictures[..., :8].mean((1, 2, 3)) > pictures[..., 8:].mean((1, 2, 3))).long()
    loader = DataLoader(TensorDataset(pictures, brighter), batch_size=64, shuffle=True, pin_memory=device.type == "cuda")
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 7 * 7, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = ps.attach(model, optimizer)

    for _ in ps.epochs(20):
        for x, y in ps.shard(loader):
            loss = nn.functional.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ps.report(loss=loss.item())

    if ps.is_first():
        with torch.no_grad():
            accuracy = (model(pictures.to(device)).argmax(1).cpu() == brighter).float().mean().item()
        print(f"trained on {device}: {accuracy:.1%} right", flush=True)
        ps.report(accuracy=accuracy)


if __name__ == "__main__":
    main()
