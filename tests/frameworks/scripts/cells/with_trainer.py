"""The Trainer of transformers in a job in ways that are refused, and without the integration (see `tests.scripts.cells`)."""

import os

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import psjob as ps
from psjob.integrations.transformers import PSCallback


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layer(x), labels)}


def arguments(folder="out", **others):
    return TrainingArguments(folder, report_to=[], use_cpu=True, **others)


torch.manual_seed(1)
data = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in torch.randn(40, 4)]

# %% trainer_finds_batch_size: The Trainer tries sizes of a batch.
Trainer(Net(), arguments(num_train_epochs=1, auto_find_batch_size=True), train_dataset=data[:8], callbacks=[PSCallback()]).train()

# %% trainer_late_callback: The callback comes after the Trainer was made.
trainer = Trainer(Net(), arguments(num_train_epochs=1), train_dataset=data[:8])
trainer.add_callback(PSCallback())
trainer.train()

# %% trainer_resumes: Training continues from a checkpoint of the Trainer's.
before = f"before-{os.getpid()}"
Trainer(Net(), arguments(before, max_steps=1, save_steps=1), train_dataset=data[:8]).train()
trainer = Trainer(Net(), arguments(num_train_epochs=1, max_steps=2, save_steps=1), train_dataset=data[:8], callbacks=[PSCallback()])
trainer.train(resume_from_checkpoint=f"{before}/checkpoint-1")


# %% trainer_by_hand: A callback of the script's own attaches model and optimizer; nobody slices the data.
class Attach(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **others):
        ps.attach(model, optimizer)


options = arguments(num_train_epochs=2, per_device_train_batch_size=2, save_strategy="no")
Trainer(Net(), options, train_dataset=data, callbacks=[Attach()]).train()
