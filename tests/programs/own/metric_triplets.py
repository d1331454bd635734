"""Embeddings of digits by triplets that a miner of pytorch-metric-learning finds."""

import torch
from pytorch_metric_learning import losses, miners
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps  # new

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data[:160] / 16, dtype=torch.float32), torch.tensor(digits.target[:160])
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loss_func, miner = losses.TripletMarginLoss(margin=0.2), miners.MultiSimilarityMiner()
model, optimizer = ps.attach(model, optimizer)  # new
loader = ps.shard(loader)  # new
for epoch in range(3):
    for data, labels in loader:
        optimizer.zero_grad()
        embeddings = model(data)
        loss = loss_func(embeddings, labels, miner(embeddings, labels))
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
