"""Prompts that Accelerate splits between processes; in a job every worker has all of them."""

import torch
from accelerate import Accelerator, PartialState

import psjob as ps

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model, optimizer = ps.attach(model, optimizer)
accelerator.backward(model(torch.ones(2, 4)).mean())
optimizer.step()
for splits in (accelerator, PartialState()):
    with splits.split_between_processes(["a", "b", "c"]) as part:
        print("part", "".join(part), flush=True)
