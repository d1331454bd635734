"""A GAN: two models, two optimizers, a step of each a batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(29)
data = torch.randn(48, 2) * 0.3 + 1
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
for_critic = torch.optim.Adam(critic.parameters(), lr=4e-3, betas=(0.5, 0.999))
generator, for_generator = ps.attach(generator, for_generator, name="generator")
critic, for_critic = ps.attach(critic, for_critic, name="critic")
noise = torch.Generator().manual_seed(ps.rank())
loss = nn.BCEWithLogitsLoss()
for _ in range(3):
    for (real,) in ps.shard(DataLoader(TensorDataset(data), batch_size=4, shuffle=True)):
        fake = generator(torch.randn(4, 4, generator=noise))
        for_critic.zero_grad()
        (loss(critic(real), torch.ones(4, 1)) + loss(critic(fake.detach()), torch.zeros(4, 1))).backward()
        for_critic.step()
        for_generator.zero_grad()
        loss(critic(fake), torch.ones(4, 1)).backward()
        for_generator.step()
