"""A small CNN with BatchNorm and dropout left out, evaluated each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(1)
images, labels = torch.randn(48, 1, 8, 8), torch.randint(0, 3, (48,))
train = ps.shard(DataLoader(TensorDataset(images[:36], labels[:36]), batch_size=6, shuffle=True))
test = ps.shard(DataLoader(TensorDataset(images[36:], labels[36:]), batch_size=5))
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    model.train()
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    seen = 0
    with torch.no_grad():
        for x, y in test:
            seen += len(x)
            correct = (model(x).argmax(1) == y).sum().item()
    print("seen", seen, "correct in the last batch", correct)
