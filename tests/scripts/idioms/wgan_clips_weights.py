"""A Wasserstein GAN: the critic's weights are clipped after each of its steps by RMSprop."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(114)
data = torch.randn(48, 2) * 0.3 + 1
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
for_generator = torch.optim.RMSprop(generator.parameters(), lr=5e-4)
for_critic = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
generator, for_generator = ps.attach(generator, for_generator, name="generator")
critic, for_critic = ps.attach(critic, for_critic, name="critic")
noise = torch.Generator().manual_seed(ps.rank())
for i, (real,) in enumerate(ps.shard(DataLoader(TensorDataset(data), batch_size=4, shuffle=True))):
    fake = generator(torch.randn(4, 4, generator=noise))
    for_critic.zero_grad()
    (critic(fake.detach()).mean() - critic(real).mean()).backward()
    for_critic.step()
    for p in critic.parameters():
        p.data.clamp_(-0.1, 0.1)
    if i % 2 == 1:
        for_generator.zero_grad()
        (-critic(fake).mean()).backward()
        for_generator.step()
