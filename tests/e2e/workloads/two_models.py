"""A GAN that trains for a while: `python two_models.py PACE`. A step of the generator comes at every other batch."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

STEPS = 40


def main(pace: float) -> None:
    torch.manual_seed(29)
    data = torch.randn(4 * STEPS * ps.world(), 2, generator=torch.Generator().manual_seed(1)) * 0.3 + 1
    generator: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    critic: nn.Module = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999)) for model in (generator, critic)]
    generator, for_generator = ps.attach(generator, optimizers[0], name="generator")
    critic, for_critic = ps.attach(critic, optimizers[1], name="critic")
    loss = nn.BCEWithLogitsLoss()
    for i, (real,) in enumerate(ps.shard(DataLoader(TensorDataset(data), batch_size=4, shuffle=True))):
        fake = generator(torch.randn(4, 4))
        for_critic.zero_grad()
        (loss(critic(real), torch.ones(4, 1)) + loss(critic(fake.detach()), torch.zeros(4, 1))).backward()
        for_critic.step()
        if i % 2 == 0:
            for_generator.zero_grad()
            loss(critic(fake), torch.ones(4, 1)).backward()
            for_generator.step()
        time.sleep(pace)


if __name__ == "__main__":
    main(float(sys.argv[1]))
