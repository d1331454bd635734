"""A neural ODE of torchdiffeq that learns a spiral from random pieces of it."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdiffeq import odeint_adjoint

import psjob as ps  # new

torch.manual_seed(0)


class Field(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))

    def forward(self, t, y):
        return self.net(y**3)


times = torch.linspace(0, 4, 52)
spiral = torch.stack([times.cos() * (-times / 4).exp(), times.sin() * (-times / 4).exp()], 1)
pieces = torch.stack([spiral[begin : begin + 4] for begin in range(48)])
loader = DataLoader(TensorDataset(pieces), batch_size=4, shuffle=True)
model = Field()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
model, optimizer = ps.attach(model, optimizer)  # new
loader = ps.shard(loader)  # new
for epoch in range(2):
    for (piece,) in loader:
        optimizer.zero_grad()
        found = odeint_adjoint(model, piece[:, 0], times[:4], method="rk4").transpose(0, 1)
        loss = (found - piece).abs().mean()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
