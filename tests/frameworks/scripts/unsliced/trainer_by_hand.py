"""A Trainer whose model and optimizer are attached by a callback of the script's own; nobody slices the data."""

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import psjob as ps


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layer(x), labels)}


class Attach(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **others):
        ps.attach(model, optimizer)


torch.manual_seed(1)
data = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in torch.randn(40, 4)]
arguments = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no")
Trainer(Net(), arguments, train_dataset=data, callbacks=[Attach()]).train()
