import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import psjob.integrations.lightning  # noqa: F401


class Two(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch, number):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.one.parameters(), lr=0.1), torch.optim.SGD(self.other.parameters(), lr=0.1)


trainer = lightning.Trainer(strategy="ps", accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(Two(), DataLoader(torch.randn(8, 4), batch_size=2))
