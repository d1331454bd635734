"""Lightning in a job in ways that are refused (see `tests.scripts.cells`)."""

import os

import lightning
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

import psjob as ps
import psjob.integrations.lightning


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


data = DataLoader(torch.randn(8, 4), batch_size=2)

# %% fabric_late: A model is attached after `fabric.setup`.
model = nn.Linear(4, 1)
model, optimizer = Fabric(accelerator="cpu", devices=1).setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
model, optimizer = ps.attach(model, optimizer)

# %% lit_averages: Lightning averages the weights.
averages = StochasticWeightAveraging(swa_lrs=0.01)
trainer = lightning.Trainer(strategy="ps", accelerator="cpu", max_epochs=2, callbacks=[averages], logger=False, enable_checkpointing=False)
trainer.fit(Net(), data)

# %% lit_resumes: Training continues from a file of Lightning's.
before, file = lightning.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False), f"{os.getpid()}.ckpt"
before.fit(Net(), data)
before.save_checkpoint(file)
lightning.Trainer(strategy="ps", accelerator="cpu", max_epochs=2, logger=False).fit(Net(), data, ckpt_path=file)


# %% lit_two_optimizers: A module has two optimizers.
class Two(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 1)

    def training_step(self, batch, number):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1), torch.optim.SGD(self.other.parameters(), lr=0.1)


trainer = lightning.Trainer(strategy="ps", accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(Two(), data)
