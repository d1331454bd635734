import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader

import psjob as ps

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.randn(16, 4), batch_size=2)
)
model, optimizer = ps.attach(model, optimizer)
skip_first_batches(loader, 3)
