"""Trains a few numbers; worker 1's first process hangs at step 10, in the way that its argument names, and says when."""

import ctypes
import os
import signal
import sys
import time

print(f"starts at {time.time()}", flush=True)

import torch  # noqa: E402

import psjob as ps  # noqa: E402

how = sys.argv[1]
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(1600, 8), torch.randn(1600, 1))
model, optimizer = ps.attach(model, optimizer)
first = os.environ["PSJOB_START"] == "1" and "PSJOB_REWINDS" not in os.environ
for x, y in ps.shard(torch.utils.data.DataLoader(data, batch_size=8)):
    if ps.rank() == 1 and first and ps.step() == 10:
        print(f"hangs at {time.time()}", flush=True)
        if how == "busy":
            while True:
                pass
        elif how == "held":  # the interpreter is not let go of
            ctypes.PyDLL(None).sleep(100_000)
        elif os.getpid() != 1:  # the first process of a container is not stopped from inside
            os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    time.sleep(0.05)
