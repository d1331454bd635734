"""Files of the script's own: a snapshot each epoch, the newest two are kept, and a history as JSON that is written anew."""

import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(17)
x = torch.randn(64, 4)
y = x.prod(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ELU(), nn.Linear(8, 1))
model, optimizer = ps.attach(model, torch.optim.RMSprop(model.parameters(), lr=0.01))
state = ps.state(history=[], tails=0)
folder = Path("snapshots")
for epoch in ps.epochs(6):
    model.train()
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    state.tails += 1
    state.history.append({"epoch": epoch, "loss": loss.item()})
    if ps.is_first():
        folder.mkdir(exist_ok=True)
        torch.save({"model": model.state_dict(), "epoch": epoch}, folder / f"{epoch}.pt")
        for old in folder.glob("*.pt"):
            if int(old.stem) < epoch - 1:
                old.unlink()
        Path("history.json").write_text(json.dumps(state.history))
        print(f"line epoch {epoch}: {len(state.history)} {state.history[-1]['loss']:.6f}")
if ps.is_first():
    kept = sorted(int(path.stem) for path in folder.glob("*.pt"))
    newest = torch.load(folder / f"{kept[-1]}.pt")
    told = json.loads(Path("history.json").read_text())
    print("line kept", kept, round(sum(float(value.double().sum()) for value in newest["model"].values()), 6))
    print("line tails", len(told), "of 6;", [entry["epoch"] for entry in told])
