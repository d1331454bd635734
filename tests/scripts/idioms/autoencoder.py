"""A convolutional autoencoder in channels_last, with transposed convolutions."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(109)
images = torch.randn(24, 1, 8, 8)
model = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.GELU(), nn.Conv2d(4, 4, 3, 1, 1), nn.GELU(), nn.ConvTranspose2d(4, 1, 4, 2, 1))
model = model.to(memory_format=torch.channels_last)
model, optimizer = ps.attach(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for _ in range(2):
    for (batch,) in ps.shard(DataLoader(TensorDataset(images), batch_size=4, shuffle=True)):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.l1_loss(model(batch.to(memory_format=torch.channels_last)), batch).backward()
        optimizer.step()
