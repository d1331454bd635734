"""Datasets that tests of slices, streams and converted scripts read."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


class Lines(IterableDataset[Any]):
    """Shared out to loader processes as torch's manual has it; each sample has a number drawn for it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        info = get_worker_info()
        begin, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(begin, self.count, step):
            yield torch.tensor([float(number), random.random(), torch.rand(1).item()], dtype=torch.float64)


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Normalises(DataLoader[Any]):
    """Batches of mean 0."""

    def __iter__(self) -> Any:
        for (x,) in super().__iter__():
            yield x - x.mean()


class Joins(DataLoader[Any]):
    """Maps its iterator, as loaders of graphs do."""

    def _get_iterator(self) -> Any:
        return (batch[0] * 10 for batch in super()._get_iterator())
