"""A vision transformer of timm with its optimizer, schedule, Mixup and average of weights, as its training script puts them together."""

import timm
import timm.data
import timm.loss
import timm.optim
import timm.scheduler
import timm.utils
import torch
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps  # new

torch.manual_seed(0)
images, labels = torch.rand(48, 3, 32, 32), torch.arange(48) % 3
loader = DataLoader(TensorDataset(images, labels), batch_size=4, shuffle=True)
loader = ps.shard(loader)  # new
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=3)
optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
scheduler = timm.scheduler.CosineLRScheduler(optimizer, t_initial=3, warmup_t=1, warmup_lr_init=1e-4)
average = timm.utils.ModelEmaV3(model, decay=0.9)
model, optimizer = ps.attach(model, optimizer, scheduler=scheduler, average=average.module)  # new
criterion = timm.loss.LabelSmoothingCrossEntropy(0.1)
for epoch in range(3):
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
    scheduler.step(epoch + 1)
    print("epoch", epoch, "loss", loss.item())
