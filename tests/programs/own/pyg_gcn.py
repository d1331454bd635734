"""Nodes of one graph in two classes, by a GCN of PyG. The graph is one batch: each worker drops other values."""

import torch
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GCN
from torch_geometric.seed import seed_everything

import psjob as ps  # new

seed_everything(3)
data = FakeDataset(num_graphs=1, avg_num_nodes=60, num_channels=8, num_classes=3, task="node")[0]
model = GCN(8, 16, 2, 3, dropout=0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
model, optimizer = ps.attach(model, optimizer)  # new
torch.manual_seed(ps.rank())  # new
for epoch in range(12):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(data.x, data.edge_index), data.y)
    loss.backward()
    optimizer.step()
    print("epoch", epoch, "loss", loss.item())
