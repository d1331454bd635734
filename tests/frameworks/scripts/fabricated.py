"""A loop of Lightning Fabric; three lines are psjob's."""

import json
import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

options = dict(word.split("=") for word in sys.argv[1:])
torch.manual_seed(3)
x = torch.randn(44, 8)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=int(options.get("size", 2)))
model, optimizer = ps.attach(model, optimizer)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
means = []
for _ in ps.epochs(2):
    for inputs, targets in ps.shard(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        means.append([fabric.all_reduce(loss.detach()).item(), fabric.all_gather(loss.detach()).mean().item()])
fabric.barrier()
fabric.save("weights.ckpt", {"model": model})
sums = [p.detach().double().sum().item() for p in model.parameters()]
print("told", json.dumps({"means": means, "sums": sums, "batches": len(loader)}), flush=True)
print("first", fabric.is_global_zero, fabric.global_rank, flush=True)
