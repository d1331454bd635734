import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import psjob.integrations.lightning  # noqa: F401


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch, number):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(strategy="ps", accelerator="cpu", max_epochs=1, sync_batchnorm=True, logger=False, enable_checkpointing=False)
trainer.fit(Net(), DataLoader(torch.randn(8, 4), batch_size=2))
