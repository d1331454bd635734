"""A file of each epoch, as StochasticWeightAveraging's refusal advises; the mean of the last two is made when the job is complete."""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob.integrations.lightning  # noqa: F401

options = dict(word.split("=") for word in sys.argv[1:])


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, number):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


torch.manual_seed(3)
x = torch.randn(32, 4)
keeps = ModelCheckpoint("kept", filename="{epoch}", save_top_k=-1)
trainer = lightning.Trainer(
    strategy=options.get("strategy", "ps"), accelerator="cpu", devices=1, max_epochs=4, callbacks=[keeps], logger=False,
    enable_progress_bar=False,
)  # fmt: skip
trainer.fit(Net(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=int(options.get("size", 2))))
