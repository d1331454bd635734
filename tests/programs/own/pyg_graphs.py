"""Whole graphs in classes, by a GIN of PyG, batched by its own loader."""

import torch
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_add_pool
from torch_geometric.seed import seed_everything

import psjob as ps  # new

seed_everything(3)
graphs = FakeDataset(num_graphs=40, avg_num_nodes=10, num_channels=8, num_classes=3, task="graph")
loader = DataLoader(graphs, batch_size=4, shuffle=True)
model = GIN(8, 16, 2, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = ps.attach(model, optimizer)  # new
loader = ps.shard(loader)  # new
for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        out = global_add_pool(model(batch.x, batch.edge_index), batch.batch)
        loss = torch.nn.functional.cross_entropy(out, batch.y)
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())
