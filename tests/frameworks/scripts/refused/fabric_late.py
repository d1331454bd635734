import torch
from lightning.fabric import Fabric

import psjob as ps

fabric = Fabric(accelerator="cpu", devices=1)
model = torch.nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
model, optimizer = ps.attach(model, optimizer)
