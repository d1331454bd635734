"""The language model that Lightning ships for tries, in a plain loop."""

import torch
from lightning.pytorch.demos import Transformer
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps  # new

torch.manual_seed(0)
tokens = torch.randint(0, 20, (48, 9))
loader = DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)
model = Transformer(vocab_size=20, ninp=16, nhead=2, nhid=32, nlayers=2, dropout=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.attach(model, optimizer)  # new
loader = ps.shard(loader)  # new
for epoch in range(2):
    for (batch,) in loader:
        inputs, target = batch[:, :-1], batch[:, 1:]
        loss = torch.nn.functional.nll_loss(model(inputs, target), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
