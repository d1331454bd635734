"""Optimizers, learning rates, and averages of the weights."""

import copy
import math
import sys

import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(0)
x = torch.randn(48, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% optimizers: Every optimizer of torch that takes dense gradients, with the arguments that people change.
# arguments: SGD Adam AdamW Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop Adafactor
OPTIONS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "Adam": {"lr": 1e-2, "betas": (0.8, 0.99), "amsgrad": True},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "maximize": False},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5, "centered": True},
}
name = sys.argv[1]
bias = [p for p in model.parameters() if p.dim() == 1]
rest = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": bias, "lr": 1e-3}]
optimizer = getattr(torch.optim, name)(rest, **OPTIONS.get(name, {}))
model, optimizer = ps.attach(model, optimizer)
# and the loop


# %% own_optimizers: Optimizers that are written in the script: Lion, and LARS.
# arguments: lion lars
def lion(p, grad, state, lr):
    average = state.setdefault("average", torch.zeros_like(p))
    p.add_((0.9 * average + 0.1 * grad).sign(), alpha=-lr)
    average.mul_(0.99).add_(grad, alpha=0.01)


def lars(p, grad, state, lr):
    trust = float(p.norm() / (grad.norm() + 1e-9)) if p.dim() > 1 else 1.0
    p.sub_(state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(grad, alpha=lr * trust))


class Own(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            {"lion": lion, "lars": lars}[sys.argv[1]](p, p.grad, self.state[p], self.defaults["lr"])


model = nn.Linear(6, 1)
model, optimizer = ps.attach(model, Own(model.parameters(), {"lr": 1e-2}))
# and the loop

# %% muon: Muon, torch's optimizer of matrices.
model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
model, optimizer = ps.attach(model, torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.1, ns_steps=3))
# and the loop

# %% no_decay: Groups with and without weight decay, as transformers are trained.
model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))
decayed = [p for name, p in model.named_parameters() if p.dim() > 1]
others = [p for name, p in model.named_parameters() if p.dim() <= 1]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
model, optimizer = ps.attach(model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)))
# and the loop

# %% lbfgs: LBFGS, whose step evaluates the loss several times.
x = torch.randn(40, 3)[ps.rank() :: ps.world()]
model = nn.Linear(3, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
model, optimizer = ps.attach(model, optimizer)


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    return loss


for _ in range(3):
    optimizer.step(closure)


# %% sequence_by_adam: An LSTM in double precision predicts a sine, as torch's example does with LBFGS; by Adam in more steps.
class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.linear = nn.LSTMCell(1, 12), nn.Linear(12, 1)

    def forward(self, inputs):
        h = c = torch.zeros(len(inputs), 12, dtype=torch.double)
        outputs = []
        for each in inputs.split(1, dim=1):
            h, c = self.cell(each, (h, c))
            outputs.append(self.linear(h))
        return torch.cat(outputs, dim=1)


waves = torch.sin(torch.arange(40) / 5 + 6 * torch.rand(8, 1)).double()[ps.rank() :: ps.world()]
model = Sequence().double()
model, optimizer = ps.attach(model, torch.optim.Adam(model.parameters(), lr=0.03))
for _ in range(60):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(waves[:, :-1]), waves[:, 1:])
    loss.backward()
    optimizer.step()
assert math.isfinite(loss.item()) and loss.item() < 0.01, loss
print("loss", loss.item())

# %% sam: Sharpness-aware minimisation by hand: weights are moved, and put back before the step.
model, optimizer = ps.attach(model, optimizer)
for inputs, targets in ps.shard(DataLoader(data, batch_size=4, shuffle=True)):
    nn.functional.mse_loss(model(inputs), targets).backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / norm for p in model.parameters()]
        for p, move in zip(model.parameters(), moves, strict=True):
            p.add_(move)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.sub_(move)
    optimizer.step()
    optimizer.zero_grad()


# %% sam_wrapped: Sharpness-aware minimisation as a class around another optimizer, stepped with a closure.
class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, **options):
        super().__init__(params, options)
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def step(self, closure=None):
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in moved:
            p.add_(p.grad, alpha=0.05)
        before = [p.grad.clone() for p in moved]
        with torch.enable_grad():
            closure()
        for p, grad in zip(moved, before, strict=True):
            p.sub_(grad, alpha=0.05)
        self.base.step()


model = nn.Linear(6, 1)
model, optimizer = ps.attach(model, SAM(model.parameters(), torch.optim.SGD, lr=0.05))
for (inputs,) in ps.shard(DataLoader(TensorDataset(x), batch_size=4)):

    def closure():
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()  # noqa: B023

    closure()
    optimizer.step(closure)

# %% schedulers: Every scheduler of torch, by step or by epoch.
# arguments: LambdaLR MultiplicativeLR StepLR MultiStepLR ConstantLR LinearLR ExponentialLR PolynomialLR CosineAnnealingLR
# arguments: ChainedScheduler SequentialLR ReduceLROnPlateau CyclicLR OneCycleLR CosineAnnealingWarmRestarts
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True))
scheduler = {
    "LambdaLR": lambda: lrs.LambdaLR(optimizer, lambda step: 0.9**step),
    "MultiplicativeLR": lambda: lrs.MultiplicativeLR(optimizer, lambda step: 0.95),
    "StepLR": lambda: lrs.StepLR(optimizer, 4), "MultiStepLR": lambda: lrs.MultiStepLR(optimizer, [3, 7]),
    "ConstantLR": lambda: lrs.ConstantLR(optimizer), "LinearLR": lambda: lrs.LinearLR(optimizer),
    "ExponentialLR": lambda: lrs.ExponentialLR(optimizer, 0.9), "PolynomialLR": lambda: lrs.PolynomialLR(optimizer, 10),
    "CosineAnnealingLR": lambda: lrs.CosineAnnealingLR(optimizer, len(loader) * 2),
    "ChainedScheduler": lambda: lrs.ChainedScheduler([lrs.ConstantLR(optimizer), lrs.ExponentialLR(optimizer, 0.9)]),
    "SequentialLR": lambda: lrs.SequentialLR(optimizer, [lrs.LinearLR(optimizer), lrs.ExponentialLR(optimizer, 0.9)], [4]),
    "ReduceLROnPlateau": lambda: lrs.ReduceLROnPlateau(optimizer, patience=0), "CyclicLR": lambda: lrs.CyclicLR(optimizer, 0.01, 0.2, 3),
    "OneCycleLR": lambda: lrs.OneCycleLR(optimizer, 0.2, total_steps=len(loader) * 2),
    "CosineAnnealingWarmRestarts": lambda: lrs.CosineAnnealingWarmRestarts(optimizer, 5),
}[sys.argv[1]]()  # fmt: skip
# and the loop over loader
# after each step:
scheduler.step(*([1.0] if sys.argv[1] == "ReduceLROnPlateau" else []))

# %% schedulers_by_epoch: Schedulers that get a fraction of an epoch, an epoch's number, or a loss on data of all workers.
# arguments: fraction number plateau
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = ps.attach(model, optimizer)
loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True))
how = sys.argv[1]
restarts = lrs.CosineAnnealingWarmRestarts(optimizer, T_0=2) if how == "fraction" else None
steps = lrs.StepLR(optimizer, 1, gamma=0.5) if how == "number" else None
plateau = lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0) if how == "plateau" else None
for epoch in range(4):
    for i, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if restarts is not None:
            restarts.step(epoch + i / len(loader))
    if steps is not None:
        steps.step(epoch)
    if plateau is not None:
        plateau.step(nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).detach())

# %% warmup_by_hand: The learning rate set by hand at each step, without a scheduler.
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
loader = ps.shard(DataLoader(data, batch_size=4, shuffle=True))
total, step = 2 * len(loader), 0
# and the loop over loader
# before each step:
step += 1
for group in optimizer.param_groups:
    group["lr"] = 0.1 * min(step / 4, 0.5 * (1 + math.cos(math.pi * step / total)))

# %% plateau_by_validation: ReduceLROnPlateau by a validation loss that all workers compute, and the best weights kept.
model, optimizer = ps.attach(model, optimizer)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
best, kept = float("inf"), None
# and the loop
# with `range(4)` for `range(2)`
# after each epoch:
with torch.no_grad():
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item()
scheduler.step(loss)
if loss < best:
    best, kept = loss, copy.deepcopy(model.state_dict())
# at the end:
assert kept is not None and optimizer.param_groups[0]["lr"] < 0.05

# %% swa: Stochastic weight averaging with torch's AveragedModel, its scheduler and update_bn.
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = ps.shard(DataLoader(data, batch_size=6, shuffle=True))
averaged, scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
# and the loop over loader
# with `range(3)` for `range(2)`
# after each epoch:
averaged.update_parameters(model)
scheduler.step()
# at the end:
update_bn(loader, averaged)
print("averaged", averaged(x).mean().item())

# %% ema: An exponential average of the weights beside the model, used at the end.
model, optimizer = ps.attach(model, optimizer)
average = copy.deepcopy(model)
# and the loop
# after each step:
with torch.no_grad():
    for kept, p in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(p, 0.1)
# at the end:
with torch.no_grad():
    assert not torch.equal(average[0].weight, model[0].weight)
    print("loss of the average", nn.functional.mse_loss(average(x), x.sum(1, keepdim=True)).item())

# %% ema_swapped_for_evaluation: An average of the weights is swapped in for an evaluation and out again.
model, optimizer = ps.attach(model, optimizer)
average = copy.deepcopy(model)
# and the loop
# after each step:
for kept, p in zip(average.parameters(), model.parameters(), strict=True):
    kept.data.mul_(0.9).add_(p.data, alpha=0.1)
# after each epoch:
for kept, p in zip(average.parameters(), model.parameters(), strict=True):
    p.data, kept.data = kept.data, p.data
with torch.no_grad():
    print("loss of the average", nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item())
for kept, p in zip(average.parameters(), model.parameters(), strict=True):
    p.data, kept.data = kept.data, p.data

# %% ema_not_swapped_back: An average of the weights is copied into the model while training continues.
model, optimizer = ps.attach(model, optimizer)
average = copy.deepcopy(model)
# and the loop
# after each step:
for kept, p in zip(average.parameters(), model.parameters(), strict=True):
    kept.data.mul_(0.9).add_(p.data, alpha=0.1)
# after each epoch:
model.load_state_dict(average.state_dict())
