"""A ResNet of timm with BatchNorm and Lamb, an optimizer of timm's own."""

import timm
import timm.optim
import torch
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps  # new

torch.manual_seed(0)
images, labels = torch.rand(40, 3, 32, 32), torch.arange(40) % 3
loader = DataLoader(TensorDataset(images, labels), batch_size=4, shuffle=True)
model = timm.create_model("resnet10t", num_classes=3)
optimizer = timm.optim.create_optimizer_v2(model, opt="lamb", lr=1e-3)
model, optimizer = ps.attach(model, optimizer)  # new
loader = ps.shard(loader)  # new
for epoch in range(2):
    model.train()
    for inputs, targets in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
