# training: mode=async
import torch
from accelerate import Accelerator

import psjob as ps

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model, optimizer = ps.attach(model, optimizer)
accelerator.check_trigger()
