"""A few optimizer steps on each batch, as PPO makes them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(13)
states, advantages = torch.randn(44, 4), torch.randn(44, 1)
policy = nn.Linear(4, 2)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
policy, optimizer = ps.attach(policy, optimizer)
for _ in range(2):
    for state, advantage in ps.shard(DataLoader(TensorDataset(states, advantages), batch_size=4, shuffle=True)):
        old = policy(state).log_softmax(-1)[:, :1].detach()
        for _update in range(3):
            ratio = (policy(state).log_softmax(-1)[:, :1] - old).exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
