"""Accelerate with early stopping and the best model saved."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(20)
x = torch.randn(96, 6)
y = x.sum(1, keepdim=True).cos()
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
model, optimizer = ps.attach(model, optimizer, schedule=schedule)
model, optimizer, loader, schedule = accelerator.prepare(
    model, optimizer, DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True), schedule
)
state = ps.state(best=float("inf"), bad=0, tails=0)
for epoch in ps.epochs(8):
    model.train()
    for inputs, targets in ps.shard(loader):
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    schedule.step()
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(x[64:]), y[64:]).item()
    state.tails += 1
    state.bad = 0 if loss < state.best else state.bad + 1
    if loss < state.best:
        state.best = loss
        if accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model).state_dict(), "best.pt")
    if accelerator.is_main_process:  # accelerator.print is one of each machine
        print(f"line epoch {epoch}: {loss:.6f} best {state.best:.6f} bad {state.bad} lr {schedule.get_last_lr()[0]:.6f}")
    if state.bad == 5:
        break
if accelerator.is_main_process:
    best = sum(float(value.double().sum()) for value in torch.load("best.pt").values())
    print(f"line tails {state.tails} of {epoch + 1}; best sum {best:.6f}")
