"""The loop of Accelerate's own pages; three lines are psjob's."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

options = dict(word.split("=") for word in sys.argv[1:])
torch.manual_seed(3)
x = torch.randn(int(options.get("count", 44)), 8)
accelerator = Accelerator(gradient_accumulation_steps=int(options.get("accumulate", 1)), mixed_precision=options.get("precision"), cpu=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(float(options.get("dropout", 0))), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2, shuffle=options.get("order") == "random")
if options.get("attach") == "before":
    model, optimizer = ps.attach(model, optimizer, scheduler=scheduler)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
if options.get("attach") == "after":
    model, optimizer = ps.attach(model, optimizer, scheduler=scheduler)
for epoch in range(3):
    for inputs, targets in ps.shard(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), float(options.get("clip", 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.print("epoch", epoch, "main", accelerator.is_main_process)
model.eval()
with torch.no_grad():
    accelerator.print("final loss", nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item())
