"""Everything that is hard to bring back to the last bit: Dropout, BatchNorm, a schedule with state, loader processes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import psjob as ps


class Noisy(Dataset):
    """Draws at random in the loader process: a sample depends on its seeds."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(torch.arange(16) * (index + 1.0)) + 0.1 * torch.randn(16)
        return x, (x[:8].sum() > x[8:].sum()).long()


def main() -> None:
    torch.manual_seed(7 + ps.rank())
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3, 4])
    model, optimizer = ps.attach(model, optimizer, schedule=schedule)
    for _ in range(5):
        for x, y in ps.shard(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ps.report(loss=loss.item())
        schedule.step()


if __name__ == "__main__":
    main()
