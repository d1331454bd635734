"""A LightningModule whose backbone is trained from the second epoch on, tested with its best checkpoint; two lines are psjob's."""

import json
import sys

import lightning
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob.integrations.lightning  # noqa: F401

options = dict(word.split("=") for word in sys.argv[1:])


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=5e-3)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def training_step(self, batch, number):
        loss = nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])
        self.log("train_loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, number):
        self.log("val_loss", nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


lightning.seed_everything(3)
x = torch.randn(44, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = Net()
saver = ModelCheckpoint(monitor="val_loss", dirpath="best")
trainer = lightning.Trainer(
    strategy=options.get("strategy", "ps"), accelerator="cpu", devices=1, max_epochs=3, logger=False, callbacks=[Unfreeze(), saver],
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, DataLoader(data, batch_size=int(options.get("size", 2))), DataLoader(data, batch_size=8))
last = {key: value.clone() for key, value in model.state_dict().items()}
told = {name: value.item() for name, value in trainer.callback_metrics.items()}
told["sums"] = [p.detach().double().sum().item() for p in last.values()]
told["tested"] = trainer.test(model, DataLoader(data, batch_size=8), ckpt_path="best", verbose=False)[0]["val_loss"]
told["groups"] = [group["lr"] for group in trainer.optimizers[0].param_groups] if trainer.optimizers else []
print("told", json.dumps(told), flush=True)
