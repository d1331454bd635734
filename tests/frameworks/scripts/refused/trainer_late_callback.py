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
trainer = Trainer(Net(), TrainingArguments("out", num_train_epochs=1, report_to=[], use_cpu=True), train_dataset=data)
trainer.add_callback(PSCallback())
trainer.train()
