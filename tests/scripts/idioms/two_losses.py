"""Two heads, two losses, two calls of backward, one step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.value, self.kind = nn.Linear(6, 12), nn.Linear(12, 1), nn.Linear(12, 3)

    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.value(h), self.kind(h)


torch.manual_seed(10)
x = torch.randn(36, 6)
data = TensorDataset(x, x.sum(1, keepdim=True), torch.randint(0, 3, (36,)))
model = Heads()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    for inputs, value, kind in ps.shard(DataLoader(data, batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        predicted, logits = model(inputs)
        nn.functional.mse_loss(predicted, value).backward(retain_graph=True)
        nn.functional.cross_entropy(logits, kind).backward()
        optimizer.step()
