"""A sine is predicted by an LSTM in double precision, as torch's example does with LBFGS; here with Adam and more steps."""

import math

import torch
from torch import nn

import psjob as ps


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.linear = nn.LSTMCell(1, 12), nn.Linear(12, 1)

    def forward(self, inputs):
        h = c = torch.zeros(len(inputs), 12, dtype=torch.double)
        outputs = []
        for each in inputs.split(1, dim=1):
            h, c = self.cell(each, (h, c))
            outputs.append(self.linear(h))
        return torch.cat(outputs, dim=1)


torch.manual_seed(0)
waves = torch.sin(torch.arange(40) / 5 + 6 * torch.rand(8, 1)).double()[ps.rank() :: ps.world()]
model = Sequence().double()
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=0.03))
for _ in range(60):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(waves[:, :-1]), waves[:, 1:])
    loss.backward()
    optimizer.step()
assert math.isfinite(loss.item()) and loss.item() < 0.01, loss
print("loss", loss.item())
