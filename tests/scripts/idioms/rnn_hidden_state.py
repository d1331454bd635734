"""A hidden state that goes on from batch to batch, cut off by detach."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(106)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, hidden):
        y, hidden = self.rnn(x, hidden)
        return self.out(y), tuple(h.detach() for h in hidden)


series = torch.randn(32, 6, 3)
model = Net()
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=1e-2))
hidden = None
for (batch,) in ps.shard(DataLoader(TensorDataset(series), batch_size=4)):
    out, hidden = model(batch[:, :-1], hidden)
    optimizer.zero_grad()
    nn.functional.mse_loss(out, batch[:, 1:]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
