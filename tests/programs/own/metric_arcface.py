"""ArcFace of pytorch-metric-learning: its loss has weights and an optimizer of its own."""

import torch
from pytorch_metric_learning import losses
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps  # new

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data[:160] / 16, dtype=torch.float32), torch.tensor(digits.target[:160])
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
loss_func = losses.ArcFaceLoss(10, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_optimizer = torch.optim.SGD(loss_func.parameters(), lr=0.01)
model, optimizer = ps.attach(model, optimizer, name="model")  # new
loss_func, loss_optimizer = ps.attach(loss_func, loss_optimizer, name="loss")  # new
loader = ps.shard(loader)  # new
for epoch in range(2):
    for data, labels in loader:
        optimizer.zero_grad()
        loss_optimizer.zero_grad()
        loss = loss_func(model(data), labels)
        loss.backward()
        optimizer.step()
        loss_optimizer.step()
    print("epoch", epoch, "loss", loss.item())
