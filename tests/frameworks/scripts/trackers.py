"""Reports to every tracker that it has open."""

import os
import sys
import time

import mlflow
import torch
import wandb
from torch.utils.tensorboard import SummaryWriter

import psjob as ps

STEPS = 100
os.chdir(sys.argv[1])  # a script may: it is started again in the folder that it began in
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
if ps.is_first():
    writer = SummaryWriter("events")
    wandb.init(project="digits", mode="offline", settings=wandb.Settings(console="off", silent=True))
    mlflow.set_experiment("digits")
    mlflow.start_run()
    print("tracked by", wandb.run.id, mlflow.active_run().info.run_id, flush=True)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
while ps.step() < STEPS:
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ps.report(loss=loss)
    time.sleep(0.02)
