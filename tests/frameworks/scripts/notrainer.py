"""How the scripts of transformers without a Trainer compute their steps and schedule, in a loop of Accelerate; three lines are psjob's."""

import json
import math
import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_scheduler

import psjob as ps

options = dict(word.split("=") for word in sys.argv[1:])
torch.manual_seed(3)
accumulate, epochs = int(options.get("accumulate", 2)), int(options.get("epochs", 3))
most = int(options["most"]) if "most" in options else None
loading = DataLoaderConfiguration(use_seedable_sampler=options.get("seedable") == "yes", split_batches=options.get("split") == "yes")
accelerator = Accelerator(gradient_accumulation_steps=accumulate, dataloader_config=loading, cpu=True)
drawn = [accelerator.process_index + 7]
with accelerator.main_process_first():
    if not os.path.exists("rows"):
        with open("rows", "w") as file:
            file.write(str(accelerator.process_index))
x = torch.randn(int(options.get("count", 44)), 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
train_loader = DataLoader(data, batch_size=2, shuffle=options.get("order") == "random")
eval_loader = DataLoader(TensorDataset(x[:10], x[:10].sum(1, keepdim=True)), batch_size=2)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

by_epochs = most is None
updates = math.ceil(len(train_loader) / accumulate)
if by_epochs:
    most = epochs * updates
scheduler = get_scheduler(
    options.get("schedule", "linear"), optimizer, num_warmup_steps=int(options.get("warmup", 0)) * accelerator.num_processes,
    num_training_steps=most if by_epochs else most * accelerator.num_processes,
)  # fmt: skip
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(model, optimizer, train_loader, eval_loader, scheduler)
updates = math.ceil(len(train_loader) / accumulate)
if by_epochs:
    most = epochs * updates
epochs = math.ceil(most / updates)

model, optimizer = ps.attach(model, optimizer, scheduler=scheduler)
done, rates, scores, means = 0, [], [], []
for _ in ps.epochs(epochs):
    model.train()
    for inputs, targets in ps.shard(train_loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            seen = accelerator.gather(loss.detach().repeat(2))
            means.append([len(seen), seen.mean().item(), accelerator.reduce(loss.detach(), reduction="mean").item()])
            if accelerator.is_last_process and done == int(options.get("stop", -1)):
                accelerator.set_trigger()
        if "stop" in options and accelerator.check_trigger():
            most = done
        if done >= most:
            break
    model.eval()
    losses, batches = [], 0
    for inputs, targets in eval_loader:
        with torch.no_grad():
            each = (model(inputs) - targets).square()
        losses.append(accelerator.gather_for_metrics(each))
        batches += 1
    scores.append([len(torch.cat(losses)), torch.cat(losses).mean().item(), batches == len(eval_loader)])
accelerator.wait_for_everyone()
with open("rows") as file:
    first = file.read()
told = {
    "rates": rates, "means": means, "first": first, "drawn": broadcast_object_list(drawn), "steps": done, "updates": updates,
    "batches": len(train_loader), "scores": scores, "processes": accelerator.num_processes, "process": accelerator.process_index,
    "main": accelerator.is_main_process, "last": accelerator.is_last_process, "local": accelerator.is_local_main_process,
    "distributed": accelerator.use_distributed,
}  # fmt: skip
with open(f"told-{accelerator.process_index}.json", "w") as file:
    json.dump(told, file)
