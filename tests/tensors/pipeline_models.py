"""Models and batches that the tests of pipelines share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Head(nn.Module):
    """Scores by the weights of an embedding: a parameter of two stages."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def row(seed: int = 0, tied: bool = True) -> nn.Sequential:
    """Eleven modules: dropout, BatchNorm, an operation in place, and a tied weight at both ends."""
    torch.manual_seed(seed)
    embedding = nn.Embedding(12, 8)
    return nn.Sequential(
        embedding,
        Mean(),
        nn.Dropout(0.2),
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(16, 8),
        nn.Tanh(),
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
        Head(embedding) if tied else nn.Linear(8, 12, bias=False),
    )


ROW_CUTS: dict[int, tuple[Any, ...]] = {1: (), 2: (5,), 4: (2, 5, "9.1")}
"""Number 5 begins with an operation in place, "9.1" lies inside an nn.Sequential."""


def tokens(count: int, samples: int = 16, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Minibatches for `row` and `Net`: ids of shape (samples, 5) and labels of shape (samples,)."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(12, (samples, 5), generator=generator), torch.randint(12, (samples,), generator=generator)) for _ in range(count)
    ]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu(self.norm(self.linear(x))))


class Net(nn.Module):
    """No nn.Sequential: several inputs, of which one goes to the end, nested outputs, a tied weight, one Dropout called twice."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(3))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        x = self.drop(self.embedding(ids).mean(1))
        for layer in self.layers:
            x = layer(x)
        x = nn.functional.dropout(self.drop(x), 0.1, self.training)
        if mask is not None:
            x = x * mask
        return {"scores": self.head(x * scale), "sizes": (x.abs().mean(), scale)}


NET_CUTS: dict[int, tuple[str, ...]] = {1: (), 2: ("layers.1",), 4: ("layers.0", "layers.2", "head")}


def net_loss(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output["scores"], target) + output["sizes"][0] * 0.1


def encoder() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.LSTM(8, 4), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))


class Across(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for p in self.parameters():
            nn.init.zeros_(p)
