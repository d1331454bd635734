"""A script of Lightning without the integration (see `tests.scripts.cells`)."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import psjob as ps


# %% lit_by_hand: A module attaches its optimizer by itself; nobody slices the data.
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return ps.attach(self, torch.optim.Adam(self.parameters(), lr=0.1))[1]


torch.manual_seed(1)
trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False)
trainer.fit(Net(), DataLoader(torch.randn(40, 4), batch_size=2))
