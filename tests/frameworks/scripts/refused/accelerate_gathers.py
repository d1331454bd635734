import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import psjob as ps

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.randn(12, 4), batch_size=2)
)
model, optimizer = ps.attach(model, optimizer)
model.eval()
with torch.no_grad():
    for batch in ps.shard(loader):
        accelerator.gather(model(batch))
