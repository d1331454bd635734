import os

import torch
from accelerate import Accelerator

import psjob as ps

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
accelerator.backward(model(torch.ones(2, 4)).mean())
optimizer.step()
folder = f"state-{os.getpid()}"
accelerator.save_state(folder)
optimizer.optimizer.state.clear()
model, optimizer = ps.attach(model, optimizer)
accelerator.load_state(folder)
