"""A frozen backbone and an output layer tied to the embedding."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.backbone = nn.Linear(8, 8)
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.embed.weight
        self.backbone.requires_grad_(False)

    def forward(self, tokens):
        return self.out(torch.tanh(self.backbone(self.embed(tokens))))


torch.manual_seed(3)
tokens = torch.randint(0, 12, (40, 5))
model = Model()
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    for (batch,) in ps.shard(DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)):
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
