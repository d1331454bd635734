"""What people give to a loader: samplers, collate functions, loader processes, streams and arrays."""

import random
import sys

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import psjob as ps

torch.manual_seed(0)
x = torch.randn(48, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% samplers: Samplers that people give to a loader.
# arguments: subset subset_random batch replacement own drop_last uneven
model, optimizer = ps.attach(model, optimizer)
data, draws = data, torch.utils.data


class Halves(draws.Sampler):
    def __iter__(self):
        return iter([*range(1, 48, 2), *range(0, 48, 2)])

    def __len__(self):
        return 48


loader = {
    "subset": lambda: DataLoader(draws.Subset(data, range(0, 48, 2)), batch_size=4, shuffle=True),
    "subset_random": lambda: DataLoader(data, batch_size=4, sampler=draws.SubsetRandomSampler(range(30))),
    "batch": lambda: DataLoader(data, batch_sampler=draws.BatchSampler(draws.RandomSampler(data), 4, drop_last=True)),
    "replacement": lambda: DataLoader(data, batch_size=4, sampler=draws.RandomSampler(data, replacement=True, num_samples=40)),
    "own": lambda: DataLoader(data, batch_size=4, sampler=Halves()),
    "drop_last": lambda: DataLoader(draws.Subset(data, range(43)), batch_size=4, shuffle=True, drop_last=True),
    "uneven": lambda: DataLoader(draws.Subset(data, range(41)), batch_size=8, shuffle=True),
}[sys.argv[1]]()
# and the loop over ps.shard(loader)

# %% weighted_sampler: Rare classes drawn more often.
x = torch.randn(60, 4)
y = (x[:, 0] > 1).long()
weights = torch.where(y == 1, 5.0, 1.0)
loader = DataLoader(TensorDataset(x, y), batch_size=6, sampler=WeightedRandomSampler(weights, 60))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    for inputs, labels in ps.shard(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

# %% distributed_sampler: A script that was written for DDP: its sampler is left in, and set_epoch is called.
sampler = DistributedSampler(data, num_replicas=ps.world(), rank=ps.rank())
loader = ps.shard(DataLoader(data, batch_size=4, sampler=sampler))
model, optimizer = ps.attach(model, optimizer)
# and the loop over loader
# before each epoch:
sampler.set_epoch(epoch)  # noqa: F821


# %% bucket_batches: Batches of sentences of like length, padded by a collate function.
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

# %% persistent_loader: Loader processes that stay over the epochs, each with its own seed and its own collate function.
model, optimizer = ps.attach(model, optimizer)


def begin(worker):
    torch.manual_seed(100 + worker)


def joined(samples):
    return torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])


options = {"num_workers": 2, "persistent_workers": True, "worker_init_fn": begin, "collate_fn": joined, "prefetch_factor": 2}
loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True, **options))
# and the loop over loader


# %% loader_processes: Two loader processes that stay, pinned memory asked for, noise drawn for each sample, and drop_last.
class Noisy(Dataset):
    def __len__(self):
        return 45

    def __getitem__(self, index):
        return torch.full((4,), index / 45) + 0.1 * torch.randn(4), torch.tensor([index / 45])


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True))
# and the loop over loader
# before each step:
assert len(inputs) == 4


# %% stream: An IterableDataset that shuffles in a buffer, read by two loader processes.
class Lines(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        buffer = []
        for number in range(info.id if info else 0, 90, info.num_workers if info else 1):
            buffer.append(number)
            if len(buffer) == 8:
                yield torch.tensor([buffer.pop(random.randrange(8))], dtype=torch.float32) / 90
        yield from (torch.tensor([number], dtype=torch.float32) / 90 for number in buffer)


model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(Lines(), batch_size=4, num_workers=2))
for _ in range(2):
    for x in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x * x).backward()
        optimizer.step()


# %% numpy_arrays: Arrays of numpy as a dataset that is written in the script, and a dictionary as its samples.
class Arrays(Dataset):
    def __init__(self):
        chance = np.random.default_rng(0)
        self.x = chance.standard_normal((42, 6)).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": np.float32(self.x[i].sum()), "number": i}


model = nn.Linear(6, 1)
model, optimizer = ps.attach(model, torch.optim.Adagrad(model.parameters(), lr=0.1))
for _ in range(2):
    for batch in ps.shard(DataLoader(Arrays(), batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.huber_loss(model(batch["x"]).squeeze(1), batch["y"]).backward()
        optimizer.step()
