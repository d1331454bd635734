import os

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from psjob.integrations.transformers import PSCallback


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layer(x), labels)}


data = [{"x": x, "labels": x.sum(0, keepdim=True)} for x in torch.randn(8, 4)]
before = f"before-{os.getpid()}"
arguments = TrainingArguments("out", num_train_epochs=1, report_to=[], use_cpu=True, max_steps=2, save_steps=1)
Trainer(Net(), TrainingArguments(before, max_steps=1, save_steps=1, report_to=[], use_cpu=True), train_dataset=data).train()
trainer = Trainer(Net(), arguments, train_dataset=data, callbacks=[PSCallback()])
trainer.train(resume_from_checkpoint=f"{before}/checkpoint-1")
