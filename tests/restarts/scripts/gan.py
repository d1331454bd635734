"""A GAN: two models and optimizers, noise of its own, and losses averaged over a pass."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(14)
data = torch.randn(64, 2) * 0.3 + 1
generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
generator, for_generator = ps.attach(generator, torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.99)), name="generator")
critic, for_critic = ps.attach(critic, torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.99)), name="critic")
state = ps.state(noise=torch.zeros(()), losses=[], tails=0)
loss = nn.BCEWithLogitsLoss()
fixed = torch.randn(16, 4)
for epoch in ps.epochs(4):
    total = 0.0
    generator.train()
    for (real,) in ps.shard(DataLoader(TensorDataset(data), batch_size=8, shuffle=True)):
        fake = generator(torch.randn(8, 4))
        for_critic.zero_grad()
        (loss(critic(real), torch.ones(8, 1)) + loss(critic(fake.detach()), torch.zeros(8, 1))).backward()
        for_critic.step()
        for_generator.zero_grad()
        fooled = loss(critic(fake), torch.ones(8, 1))
        fooled.backward()
        for_generator.step()
        total += fooled.item()
    generator.eval()
    state.tails += 1
    state.noise += total
    state.losses.append(round(total / 4, 5))
    if ps.is_first():
        with torch.no_grad():
            print(f"line epoch {epoch}: {state.losses} {generator(fixed).mean().item():.6f} {state.noise.item():.5f}")
if ps.is_first():
    print("line tails", state.tails, "of 4")
