"""An actor and a critic that one optimizer trains, of which one is attached."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(205)
x = torch.randn(48, 4)
actor, critic = nn.Linear(4, 2), nn.Linear(6, 1)
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)
actor, optimizer = ps.attach(actor, optimizer)
for (inputs,) in ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    (critic(torch.cat([inputs, actor(inputs)], 1)) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
