"""The data set and the model that Accelerate ships for its own tests, in its loop."""

import torch
from accelerate import Accelerator
from accelerate.test_utils.training import RegressionDataset, RegressionModel
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

import psjob as ps  # new

set_seed(42)
accelerator = Accelerator(cpu=True)
model = RegressionModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(RegressionDataset(length=64, seed=42), batch_size=4, shuffle=False)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model, optimizer = ps.attach(model, optimizer)  # new
for epoch in range(3):
    for batch in ps.shard(loader):  # new
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print("epoch", epoch, "loss", loss.item())
