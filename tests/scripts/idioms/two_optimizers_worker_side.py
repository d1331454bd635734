"""Two models with an optimizer that has no rule on the shards, one stepped twice as often."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(30)
x = torch.randn(48, 4)
body, head = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1)
slow, fast = torch.optim.RMSprop(body.parameters(), lr=1e-3), torch.optim.RMSprop(head.parameters(), lr=5e-3)
body, slow = ps.attach(body, slow, name="body")
head, fast = ps.attach(head, fast, name="head")
for _ in range(2):
    for i, (inputs, targets) in enumerate(ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))):
        fast.zero_grad()
        nn.functional.mse_loss(head(body(inputs)), targets).backward()
        fast.step()
        if i % 2:
            slow.step()
            slow.zero_grad()
