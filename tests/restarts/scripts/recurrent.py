"""A hidden state that goes from batch to batch and from epoch to epoch, and a perplexity."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(15)
tokens = torch.randint(0, 9, (64, 7))
embedding, rnn, out = nn.Embedding(9, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, 9)
model = nn.ModuleDict({"embedding": embedding, "rnn": rnn, "out": out})
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.5))
state = ps.state(hidden=torch.zeros(1, 8, 8), tails=0, best=float("inf"))
for epoch in ps.epochs(6):
    total = 0.0
    for (batch,) in ps.shard(DataLoader(TensorDataset(tokens), batch_size=8, drop_last=True)):
        optimizer.zero_grad()
        found, hidden = model["rnn"](model["embedding"](batch[:, :-1]), state.hidden)
        loss = nn.functional.cross_entropy(model["out"](found).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        state.hidden = hidden.detach()
        total += loss.item()
    state.tails += 1
    if total < state.best:
        state.best = total
    else:
        for group in optimizer.param_groups:
            group["lr"] /= 4
    if ps.is_first():
        print(f"line epoch {epoch}: {math.exp(total / 4):.6f} {state.hidden.sum().item():.6f} lr {optimizer.param_groups[0]['lr']}")
if ps.is_first():
    print("line tails", state.tails, "of 6")
