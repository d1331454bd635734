"""Says whether torch was imported before it began; waits in step 20 until its fork server has imported it too."""

# ruff: noqa: E402
import select
import sys
import time

print("begins with torch" if "torch" in sys.modules else "begins without torch", flush=True)

import torch

import psjob as ps
from psjob.worker import rewind

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=0.01))
data = torch.utils.data.TensorDataset(torch.randn(600, 64), torch.randn(600, 64))
state = ps.state(steps=0)
for _ in ps.epochs(2):
    for x, y in ps.shard(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)):
        if state.steps == 20:
            rewind.prepare_fork_server(1e9)
            assert rewind._server is None or select.select([rewind._server[1]], [], [], 60)[0]
        time.sleep(0.01)  # faults come by the step that is seen
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        if "clip" in sys.argv:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        state.steps += 1
print(f"ends after {state.steps} steps", flush=True)
