"""The model that Lightning ships for tries, trained by its Trainer."""

import sys

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader, Subset

import psjob.integrations.lightning  # noqa: F401 # new

options = dict(word.split("=") for word in sys.argv[1:])
strategy = options.get("strategy", "ps")
seed_everything(1, verbose=False)
trainer = Trainer(
    strategy=strategy,  # new
    num_nodes=2 if strategy == "ddp" else 1, accelerator="cpu", devices=1, max_epochs=2, limit_train_batches=8, limit_val_batches=2,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
)  # fmt: skip
model, data = BoringModel(), RandomDataset(32, 64)
if strategy == "ddp":  # its own sampler would shuffle
    data = Subset(data, range(int(options["rank"]), 64, 2))
trainer.fit(model, DataLoader(data), DataLoader(RandomDataset(32, 64)))
if trainer.is_global_zero:
    print("final loss", model.loss(model(torch.ones(4, 32))).item())
