"""Actor and critic, each with its optimizer, and one norm over the parameters of both."""

import itertools
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

# arguments: Adam SGD
# training: updateAt=server

torch.manual_seed(205)
x = torch.randn(42, 4)
kind = getattr(torch.optim, sys.argv[1])
actor, critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Linear(6, 1)
actor, for_actor = ps.attach(actor, kind(actor.parameters(), lr=1e-2), name="actor")
critic, for_critic = ps.attach(critic, kind(critic.parameters(), lr=2e-2), name="critic")
for _ in range(2):
    for (inputs,) in ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True)):
        for_actor.zero_grad()
        for_critic.zero_grad()
        (critic(torch.cat([inputs, actor(inputs)], 1)) - 3 * inputs.sum(1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(itertools.chain(actor.parameters(), critic.parameters()), 0.6)
        for_critic.step()
        for_actor.step()
