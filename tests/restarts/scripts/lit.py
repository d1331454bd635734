"""Lightning with early stopping, the best checkpoint, and a metric over the epoch."""

from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps
import psjob.integrations.lightning


class Net(lightning.LightningModule):
    """Trains, evaluates, and counts its epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("tails", torch.zeros((), dtype=torch.long))

    def training_step(self, batch, number):
        """One."""
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, number):
        """One."""
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        """A line."""
        if not self.trainer.sanity_checking and ps.is_first():
            print(f"line epoch {self.current_epoch}: {self.trainer.callback_metrics['val_loss'].item():.6f}")

    def on_train_epoch_end(self) -> None:
        """A tail."""
        self.tails += 1

    def configure_optimizers(self):
        """With a schedule by epoch."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.03)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


lightning.seed_everything(21)
x = torch.randn(96, 6)
y = x.sum(1, keepdim=True).cos()
model = Net()
stopping = EarlyStopping("val_loss", patience=4)
best = ModelCheckpoint("best", "{epoch}", monitor="val_loss", save_last=True)
last = Path("best/last.ckpt")
trainer = lightning.Trainer(
    strategy="ps", accelerator="cpu", devices=1, max_epochs=6, gradient_clip_val=0.5, callbacks=[stopping, best], logger=False,
    enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
)  # fmt: skip
loader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
held = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)
trainer.fit(model, loader, held, ckpt_path=str(last) if last.exists() else None)
if ps.is_first():
    print(f"line tails {int(model.tails)} of {trainer.current_epoch}; best {best.best_model_score.item():.6f}")
