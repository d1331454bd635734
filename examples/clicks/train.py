"""Predicts clicks from who sees what. Ordinary PyTorch but for the lines that say `ps`; users and items are rows on the shards."""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

USERS, ITEMS, TASTES, RECENT = 400, 300, 6, 5


class Clicks(nn.Module):
    """Users by their 64-bit ids, whoever comes; items by number; what the user saw before as a bag of items."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.user = ps.Embedding(None, dim, scale=0.1, optimizer="adagrad", lr=0.1)
        self.item = ps.Embedding(ITEMS, dim, scale=0.1, optimizer="adagrad", lr=0.1)
        self.recent = ps.EmbeddingBag(ITEMS + 1, dim, mode="mean", padding_idx=ITEMS, scale=0.1, optimizer="rowwise_adagrad", lr=0.1)
        self.head = nn.Sequential(nn.Linear(4 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor, recent: torch.Tensor) -> torch.Tensor:
        user, item = self.user(users), self.item(items)
        return self.head(torch.cat([user, item, user * item, self.recent(recent)], 1)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128, help="per worker")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test = impressions(40_000), impressions(4_000, seed=2)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model = Clicks()
    model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=0.003))

    total = args.epochs * math.ceil(len(loader) / ps.world())
    for epoch in ps.epochs(args.epochs):  # those that are not finished, after a restart
        for users, items, recent, clicked in ps.shard(loader):
            loss = nn.functional.binary_cross_entropy_with_logits(model(users, items, recent), clicked)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ps.report(loss=loss.item(), total=total)
        if ps.is_first():
            print(f"epoch {epoch + 1} of {args.epochs}: loss {loss.item():.4f}", flush=True)

    if ps.is_first():
        found = auc(model, test)
        ps.report(test_auc=found)
        print(f"test auc {found:.3f}", flush=True)


def impressions(count: int, seed: int = 1) -> TensorDataset:
    """Who saw what after what, and clicked: more likely where the user's tastes are the item's. All from a seed."""
    world = torch.Generator().manual_seed(7)
    ids = torch.randint(-(1 << 62), 1 << 62, (USERS,), generator=world)
    likes, shows = (torch.randn(n, TASTES, generator=world) for n in (USERS, ITEMS))
    chance = torch.Generator().manual_seed(seed)
    users = torch.randint(0, USERS, (count,), generator=chance)
    items = (torch.rand(count, generator=chance) ** 2 * ITEMS).long()
    recent = torch.randint(0, ITEMS, (count, RECENT), generator=chance)
    recent[torch.rand(count, RECENT, generator=chance) < 0.3] = ITEMS
    match = (likes[users] * shows[items]).sum(1)
    clicked = torch.rand(count, generator=chance) < torch.sigmoid(1.5 * match - 1)
    return TensorDataset(ids[users], items, recent, clicked.float())


@torch.no_grad()
def auc(model: nn.Module, test: TensorDataset) -> float:
    """How often a clicked impression scores above one that was not."""
    users, items, recent, clicked = test.tensors
    rank = model(users, items, recent).argsort().argsort().double() + 1
    hits = float(clicked.sum())
    return float((rank[clicked.bool()].sum() - hits * (hits + 1) / 2) / (hits * (len(clicked) - hits)))


if __name__ == "__main__":
    main()
