"""Gradients and weights that a script changes itself: clipping, scaling, noise, steps by hand."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(0)
x = torch.randn(48, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

# %% clip_norm: Clipping by norm, as most training scripts do it.
data = TensorDataset(x, 5 * x.sum(1, keepdim=True))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = ps.attach(model, optimizer)
# and the loop
# before each step:
norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
# at the end:
print("norm", norm.item())

# %% clip_norm_worker_side: Clipping by norm with an optimizer that the workers step.
# as clip_norm
# with `torch.optim.RMSprop(model.parameters(), lr=1e-3)` for `torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)`

# %% clip_value: Clipping by value.
data = TensorDataset(x, 5 * x.sum(1, keepdim=True))
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
# and the loop
# before each step:
nn.utils.clip_grad_value_(model.parameters(), 0.5)

# %% clips_after_unscaling: A GradScaler whose gradients are unscaled and clipped before its step, or that is not enabled.
# arguments: enabled disabled
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=sys.argv[1] == "enabled")
model, optimizer = ps.attach(model, optimizer, scaler=scaler)
for inputs, targets in ps.shard(DataLoader(data, batch_size=4, shuffle=True)):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(inputs)
    scaler.scale(nn.functional.mse_loss(out.float(), targets)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()

# %% grad_scaler: Mixed precision with a GradScaler, one of whose steps overflows.
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
model, optimizer = ps.attach(model, optimizer, scaler=scaler)
for step, (inputs, targets) in enumerate(ps.shard(DataLoader(data, batch_size=4))):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
    optimizer.zero_grad()
    scaler.scale(loss * (1e38 if step == 2 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()

# %% gradient_noise: Noise is added to the gradients by hand, each worker its own.
model, optimizer = ps.attach(model, optimizer)
noise = torch.Generator().manual_seed(ps.rank())
# and the loop
# before each step:
for p in model.parameters():
    p.grad.add_(torch.randn(p.shape, generator=noise), alpha=0.01)

# %% clamps_gradients: Gradients are clamped by hand, each worker its own.
model, optimizer = ps.attach(model, optimizer)
# and the loop
# before each step:
for p in model.parameters():
    p.grad[:].clamp_(-0.01, 0.01)

# %% hook_on_a_parameter: Gradients are changed by a hook in the backward pass.
model, optimizer = ps.attach(model, optimizer)
model[0].weight.register_hook(lambda grad: grad * 0.5)
# and the loop

# %% clamps_weights, clamps_weights_worker_side [updateAt=worker]: Weights that are clamped after each step.
model, optimizer = ps.attach(model, optimizer)
# and the loop
# after each step:
with torch.no_grad():
    for p in model.parameters():
        p.clamp_(-0.2, 0.2)

# %% renormalises_weights: The rows of a layer are brought to norm 1 after each step, by hand.
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = ps.attach(model, optimizer)
# and the loop
# after each step:
model.weight.data /= model.weight.data.norm(dim=1, keepdim=True)

# %% steps_by_hand: The optimizer is attached, and the script steps without it.
model, optimizer = ps.attach(model, optimizer)
for _ in range(2):
    for inputs, targets in ps.shard(DataLoader(data, batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        for p in model.parameters():
            p.data -= 0.05 * p.grad

# %% steps_by_hand_without_optimizer: No optimizer at all: the script steps by itself.
# as steps_by_hand
# with `model, _ = ps.attach(model)` for `model, optimizer = ps.attach(model, optimizer)`
# with `model.zero_grad` for `optimizer.zero_grad`
