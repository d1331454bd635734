"""A policy gradient on a bandit: no loader, the data are what the policy does."""

import torch
from torch import nn

import psjob as ps

torch.manual_seed(21)
policy = nn.Linear(1, 4)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
policy, optimizer = ps.attach(policy, optimizer)
generator = torch.Generator().manual_seed(100 + ps.rank())
pays = torch.tensor([0.1, 0.2, 0.9, 0.3])
for _ in range(12):
    logits = policy(torch.ones(16, 1))
    arms = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    rewards = (torch.rand(16, generator=generator) < pays[arms]).float()
    loss = -(logits.log_softmax(-1)[torch.arange(16), arms] * (rewards - rewards.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
