"""Two named models, clipped one after the other before either is stepped; one is used by a method that is not its forward."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 2)

    def act(self, x):
        return self.body(x).tanh()


torch.manual_seed(203)
x = torch.randn(48, 4)
actor, critic = Actor(), nn.Linear(6, 1)
actor, for_actor = ps.attach(actor, torch.optim.Adam(actor.parameters(), lr=1e-2), name="actor")
critic, for_critic = ps.attach(critic, torch.optim.Adam(critic.parameters(), lr=1e-2), name="critic")
for _ in range(2):
    for (inputs,) in ps.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True)):
        for_actor.zero_grad()
        for_critic.zero_grad()
        (critic(torch.cat([inputs, actor.act(inputs)], 1)) - inputs.sum(1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 0.2)
        nn.utils.clip_grad_norm_(critic.parameters(), 0.4)
        for_critic.step()
        for_actor.step()
