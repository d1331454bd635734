"""Trains a few numbers until it comes into the state that its argument names, and says so by a file `there` beside it."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

how = sys.argv[1]


def there() -> None:
    Path("there").touch()


if how == "imports":
    there()
    time.sleep(1000)

import torch  # noqa: E402

import psjob as ps  # noqa: E402

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(16000, 8), torch.randn(16000, 1))
model, optimizer = ps.attach(model, optimizer)
if how == "no step":
    there()
    time.sleep(1000)
for x, y in ps.shard(torch.utils.data.DataLoader(data, batch_size=8)):
    if ps.step() == 20 and ps.rank() == 1:
        there()
        if how == "busy":
            while True:
                pass
        elif how == "held":  # the interpreter is not let go of
            ctypes.PyDLL(None).sleep(100_000)
        elif how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    time.sleep(0.02)
