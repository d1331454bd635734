"""Three passes of one network and a triplet loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(110)
data = TensorDataset(torch.randn(40, 6), torch.randn(40, 6), torch.randn(40, 6))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
loss = nn.TripletMarginLoss(margin=0.5)
for anchor, near, far in ps.shard(DataLoader(data, batch_size=4, shuffle=True)):
    optimizer.zero_grad()
    loss(model(anchor), model(near), model(far)).backward()
    optimizer.step()
