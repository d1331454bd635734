"""Batches of sentences of like length, padded by a collate function."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

import psjob as ps


class Buckets(Sampler):
    def __init__(self, lengths, size):
        self.lengths, self.size = lengths, size

    def __len__(self):
        return -(-len(self.lengths) // self.size)

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i])
        batches = [order[i : i + self.size] for i in range(0, len(order), self.size)]
        random.shuffle(batches)
        return iter(batches)


torch.manual_seed(6)
sentences = [torch.randint(1, 20, (int(n),)) for n in torch.randint(2, 9, (42,))]
loader = DataLoader(
    sentences, batch_sampler=Buckets([len(s) for s in sentences], 4), collate_fn=lambda b: pad_sequence(b, batch_first=True)
)
model = nn.Sequential(nn.EmbeddingBag(20, 8, padding_idx=0), nn.Linear(8, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    for batch in ps.shard(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch)[:, 0], (batch > 10).float().sum(1)).backward()
        optimizer.step()
