"""A LightningModule as Lightning's own pages have it; two lines are psjob's."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob.integrations.lightning  # noqa: F401

options = dict(word.split("=") for word in sys.argv[1:])


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(float(options.get("dropout", 0))), nn.Linear(16, 1))

    def training_step(self, batch, number):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, number):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (total + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


lightning.seed_everything(3)
x = torch.randn(int(options.get("count", 44)), 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = Net()
strategy, rank = options.get("strategy", "ps"), int(options.get("rank", -1))
batches = [[2 * number, 2 * number + 1] for number in range(22)]
if rank >= 0:  # under DDP the same slices
    loader = DataLoader(data, batch_sampler=batches[rank::2])
else:
    loader = DataLoader(data, batch_size=2, shuffle=options.get("order") == "random")
trainer = lightning.Trainer(
    strategy=strategy, accelerator="cpu", devices=1, max_epochs=3, gradient_clip_val=float(options.get("clip", 0.5)),
    accumulate_grad_batches=int(options.get("accumulate", 1)), precision=options.get("precision", "32-true"),
    logger=options.get("logger") == "yes",
    enable_checkpointing=options.get("save") == "yes", enable_progress_bar=False, enable_model_summary=False,
    use_distributed_sampler=False, val_check_interval=float(options.get("validate", 1.0)), num_nodes=1 if rank < 0 else 2,
)  # fmt: skip
trainer.fit(model, loader, DataLoader(data, batch_size=8))
model.eval()
with torch.no_grad():
    print("final loss", nn.functional.mse_loss(model.net(x), x.sum(1, keepdim=True)).item())
print("steps", trainer.global_step, "epochs", trainer.current_epoch, "main", trainer.is_global_zero)
