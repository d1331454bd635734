import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import psjob.integrations.lightning  # noqa: F401


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


data = DataLoader(torch.randn(8, 4), batch_size=2)
before, file = lightning.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False), f"{os.getpid()}.ckpt"
before.fit(Net(), data)
before.save_checkpoint(file)
lightning.Trainer(strategy="ps", accelerator="cpu", max_epochs=2, logger=False).fit(Net(), data, ckpt_path=file)
